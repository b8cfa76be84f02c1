"""Programs of a CPU: recorded operations, repeated by a compiled module, give what plain PyTorch gives for other inputs."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from elman_authors.testing.kernel import need_host_compiler
from elman_megakernel.steps import program as programs
from elman_megakernel.steps import recorder as made_in
from elman_megakernel.steps import step
from elman_megakernel.steps.lower import CODES, INT8
from elman_megakernel.steps.recorder import CpuRecorder
from elman_megakernel.steps.rows import Batch, Recorded, RowsProgram
from elman_megakernel.tape import Operation
from torch import nn

from elman_core import LadderLM
from elman_core.generation import Sampling, decoder, generate_bytes, round_to_int8
from elman_core.generation.sampling import choose
from elman_core.kernels import build, launch
from elman_core.kernels.runtime import row_by_row, spare_rows
from elman_core.registry import ConfigError, KernelError, list_variants

f32, bf16 = torch.float32, torch.bfloat16
ROWS = torch.tensor([[0, 69, 7, 7, 13]])
# Of a (3, 5, 70), b (70), c (3, 1, 70), w (70, 70), s (3, 4, 70, 20), b and c with gaps: every instruction.
FUNCTIONS = {
    "pointwise": lambda a, b, c, **_: [
        torch.exp(9 * a), a.tanh() - c.sigmoid(), F.silu(a) / (b.abs() + 1), F.logsigmoid(c), F.softplus(a), 1 - b,
        a.square().neg(), a.abs().sqrt(), (b.abs() + 1).rsqrt(), (b.abs() + 1).reciprocal(), (a.abs() + 1).log(), a.relu(),
        torch.minimum(a, c), torch.maximum(a, b), torch.add(a, b, alpha=3), torch.sub(a, b, alpha=3),
        torch.addcmul(a, b, c, value=-0.5),
    ],
    "in place": lambda a, b, **_: [(a * 1).mul_(b).add_(1).div_(4).tanh_(), torch.mul(a, b, out=torch.empty_like(a))],
    "moved": lambda a, c, **_: [
        a.to(f32), a.to(bf16), a.mT.contiguous(), a.mT.reshape(-1), a.mT.clone(), torch.cat([a, c], 1),
        torch.stack([a, a + 1], 1),
    ],
    "sums": lambda a, s, **_: [a.sum(-1), a.sum(1, keepdim=True), a.mean(0), torch.linalg.vecdot(a, a), s.sum(-2)],
    "products": lambda a, b, w, **_: [
        F.linear(a, w), F.linear(a, w[:7], b[:7]), F.linear(a[:, 0], w), torch.addmm(a[0], a[1], w.mT), a @ w.mT,
    ],
    "products in float32": lambda a, w, s, **_: [
        s.float().mT @ s.float(), s.float()[:, :, :1] @ s.float().mT, a.float() @ w.float(), torch.bmm(a.float(), a.float().mT),
    ],
    "rows of a table": lambda w, **_: [F.embedding(ROWS, w)],
}  # fmt: skip


def _in_python(program) -> list[str]:
    """The operators for which there are no instructions."""
    return [part.name for part in program.parts if isinstance(part, Operation)]


@pytest.fixture
def module():
    need_host_compiler()
    return launch.opened(made_in.extension(), made_in.FAMILY)


@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_program_gives_what_plain_pytorch_gives_for_other_inputs(name, dtype, module):
    random = torch.Generator().manual_seed(0)

    def drawn(*sizes):
        return torch.randn(*sizes, generator=random).to(dtype)

    inputs = {
        "a": drawn(3, 5, 70), "b": drawn(140)[::2], "c": drawn(6, 2, 70)[::2, :1], "w": drawn(70, 70), "s": drawn(3, 4, 70, 20),
    }  # fmt: skip
    results = [torch.zeros_like(x) for x in FUNCTIONS[name](**inputs)]

    def run():
        for x in inputs.values():
            x.mul_(1)  # what nothing writes is a constant
        for to, of in zip(results, FUNCTIONS[name](**inputs), strict=True):
            to.copy_(of)
        return results[0]

    with torch.inference_mode():
        program = CpuRecorder(module).record(run)
        assert _in_python(program) == []
        for x in inputs.values():
            x.copy_(torch.randn(x.shape, generator=random))
        program()
        for x, right in zip(results, FUNCTIONS[name](**inputs), strict=True):
            close = {"rtol": 1e-5, "atol": 2e-5} if x.dtype == f32 and dtype == f32 else {"rtol": 2**-7, "atol": 2**-5}
            torch.testing.assert_close(x, right, **close)


@pytest.mark.parametrize(
    "how",
    [Sampling(), Sampling(0.0, repetition_penalty=1.4), Sampling(0.7, 40, 0.9, 1.3), Sampling(1.3, 0, 0.6)],
    ids=str,
)
def test_a_program_draws_the_class_that_plain_pytorch_draws(how, module):
    random = torch.Generator().manual_seed(0)
    logits, seen = torch.zeros(50, 300), torch.rand(50, 300, generator=random) < 0.1
    drawn, shown = torch.zeros(2, 50, dtype=torch.int64)
    given, waits = seen.clone(), torch.ones(50, 300)

    def run():
        logits.mul_(1)
        choose(logits, how, seen, waits if how.temperature else None, drawn, shown)
        return drawn

    with torch.inference_mode():
        program = CpuRecorder(module).record(run)
        assert _in_python(program) == []
        logits.copy_(3 * torch.randn(50, 300))[7, 3] = torch.nan
        waits.exponential_(generator=random)
        program()
        found = drawn.clone(), shown.clone(), seen.clone()
        seen.copy_(given)
        run()
    fine = torch.arange(50) != 7
    for x, right in zip(found, (drawn, shown, seen), strict=True):
        assert torch.equal(x[fine], right[fine])
    assert found[1][7] == shown[7] == -1


def test_rounded_matrices_are_read_as_int8(module, monkeypatch):
    layer, codes, plain = torch.nn.Linear(70, 50), [], programs.call
    before = layer.weight.detach().clone()
    round_to_int8(layer)
    w, x, y = layer.weight.detach(), torch.ones(3, 70), torch.zeros(4, 3, 50)
    assert ((w - before).abs() <= before.abs().amax(1, keepdim=True) / 254 * 1.001).all()
    matrices = [w, -0.37 * w, w[:40], before]
    monkeypatch.setattr(programs, "call", lambda _, code, threads: codes.append(code) or plain(module, code, threads))

    def run():
        x.mul_(1)
        for to, matrix in zip(y, matrices, strict=True):
            to[:, : len(matrix)].copy_(x @ matrix.T)
        return y

    with torch.inference_mode():
        program = CpuRecorder(module).record(run)
        read = [code[21] for code in codes[-1] if code[0] == CODES["linear"]]
        x.copy_(torch.randn(3, 70))
        program()
        found = y.clone()
        run()
    torch.testing.assert_close(found, y, rtol=1e-5, atol=1e-5)
    assert read == [INT8, INT8, INT8, 1]
    with pytest.raises(ConfigError, match="only a float32 model"):
        round_to_int8(layer.to(bf16))


def test_a_wrong_instruction_and_work_that_is_not_listed_are_found(module, monkeypatch):
    x, y, hidden = torch.ones(8), torch.zeros(8), [1.0]

    def unlisted():
        hidden[0] *= 2  # as code that a compiler made does: no operation of torch shows it
        return y.add_(hidden[0])

    with pytest.raises(KernelError, match="wrong state"):
        CpuRecorder(module).record(unlisted)
    monkeypatch.setitem(CODES, "add", CODES["sub"])
    with pytest.raises(KernelError, match=r"wrong aten.add.Tensor: set ELMAN_KERNELS=off"):
        CpuRecorder(module).record(lambda: y.copy_(x + 2))


@pytest.mark.parametrize("variant", list_variants())
def test_a_text_of_a_program_is_that_of_plain_pytorch(variant, module, monkeypatch, caplog):
    torch.manual_seed(0)
    model = LadderLM(variant, dim=128, depth=1).eval()
    if any(block.mixer.state_growth != "constant" for block in model.model.layers):
        pytest.skip("its state grows")
    made = []

    class Counting(CpuRecorder):
        def record(self, *given):
            made.append(super().record(*given))
            return made[-1]

    texts = []
    for recorder in (None, Counting(module)):
        monkeypatch.setattr(decoder, "recorder_for", lambda *_, recorder=recorder: recorder)
        with caplog.at_level(logging.WARNING):
            for num in (1, 2, 7):
                how = {"num": num, "how": Sampling(0.8, 40, 0.9), "seed": 1}
                texts.append(list(generate_bytes(model, b"def ", max_new_bytes=24, **how)))
    assert texts[:3] == texts[3:]
    assert not caplog.messages
    assert len(made) == 2 + 3, "the step once for all, and each draw"


class Switched(nn.Module):
    """A part of a model that can be told to count twice, as adapters are told to count or not."""

    def __init__(self, part):
        super().__init__()
        self.part, self.settings = part, {"default": [1]}

    def forward(self, x):
        return self.part(x) * self.settings["default"][0]


def test_the_program_of_a_model_follows_every_change_of_it(module, monkeypatch):
    torch.manual_seed(0)
    model = LadderLM("e42", dim=64, depth=1).eval()
    mixer: Any = model.model.layers[0].mixer
    mixer.out_proj = part = Switched(mixer.out_proj)
    changes = (
        lambda: None,
        lambda: [p.data.add_(torch.randn_like(p), alpha=0.2) for p in model.parameters()],
        lambda: part.settings.update(default=[9]),
        lambda: setattr(part, "part", nn.Sequential(part.part, nn.Tanh())),
    )
    seen = []
    for change in changes:
        with torch.inference_mode():
            change()
        for recorder in (None, CpuRecorder(module)):
            monkeypatch.setattr(decoder, "recorder_for", lambda *_, recorder=recorder: recorder)
            seen.append(list(generate_bytes(model, b"def ", max_new_bytes=24, how=Sampling(0.8), seed=1)))
    assert seen[::2] == seen[1::2]
    assert len({*map(str, seen)}) == len(changes)


def test_the_step_of_a_model_that_does_not_change_is_recorded_once(module, monkeypatch):
    monkeypatch.setattr(decoder, "recorder_for", lambda *_: CpuRecorder(module))
    model, known = LadderLM("e42", dim=64, depth=1).eval(), []
    for _ in range(2):
        list(generate_bytes(model, b"def ", max_new_bytes=24, seed=1))
        known.append(step._known[model][1])
    assert known[0] is known[1]


def test_a_program_serves_any_number_of_rows_with_the_same_bits_or_is_refused(module):
    random = torch.Generator().manual_seed(0)
    w, b = torch.randn(70, 70, generator=random), torch.randn(70, generator=random)

    def recorded(rows, function):
        x, y = torch.randn(rows, 70, generator=random), torch.zeros(rows, 70)
        return Recorded(CpuRecorder(module).record(lambda: y.copy_(function(x.mul_(1)))), [x, y])

    def step(x):  # memory with offsets and in another order, numbers of no row, operations without instructions
        spread = torch.stack([F.linear(x, w, b), x.roll(1, -1)]).transpose(0, 1)[:, 1:]
        return torch.cat([spread[:, 0].cumsum(-1)[:, :30], (x @ w).tanh()[:, :40]], 1) + w.exp().mean(0)

    program = RowsProgram(recorded(2, step), recorded(3, step))
    x, found = torch.randn(9, 70, generator=random), []
    batch = Batch(program, 9)
    for rows in (9, 1, 6, 7):
        batch.given[0][:rows] = x[:rows]
        batch.run(rows)
        torch.testing.assert_close(batch.given[1][:rows], step(x[:rows]), rtol=1e-5, atol=1e-4)
        found.append(batch.given[1][:rows].clone())
    assert all(torch.equal(each, found[0][: len(each)]) for each in found)
    for uneven, said in (
        (lambda x: x + len(x), "its numbers"),
        (lambda x: torch.add(x, x, alpha=len(x)), "its numbers"),
        (lambda x: x + x.sum(0), "its numbers"),
        (lambda x: torch.stack([row * 2 for row in x]), "its operations"),
        (lambda x: x + x.flip(0), "the bits of a row"),
    ):
        with pytest.raises(RuntimeError, match=said):
            RowsProgram(recorded(2, uneven), recorded(3, uneven))


def compiler(folder, does):
    """A program in the compiler's place: `made` is what it shall write."""
    folder.mkdir(exist_ok=True)
    (script := folder / "c++").write_text(f'#!/bin/sh\nfor made; do :; done\necho "$made" >> {folder}/runs\n{does}\n')
    script.chmod(0o755)
    return str(script)


KILLED = 'echo half > "$made"; kill -9 $$'
OLD = """echo "cc1plus: error: bad value ('x86-64-v4') for '-march=' switch" >&2; exit 1"""


def test_it_is_compiled_beside_the_first_text_and_said_in_one_line_where_it_cannot_be(
    module, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(made_in, "_ready", [])
    monkeypatch.setattr(build, "_failed", {})
    monkeypatch.setenv("ELMAN_CACHE", str(tmp_path / "cache"))
    model = LadderLM("e42", dim=32, depth=1).eval()
    monkeypatch.setenv("ELMAN_KERNELS", "off")
    plain = list(generate_bytes(model, b"def ", max_new_bytes=decoder.WORTH, seed=1))
    monkeypatch.setenv("ELMAN_KERNELS", "auto")
    for i, (cxx, said) in enumerate([
        ("no-such-compiler", "CXX=no-such-compiler is not an executable"),
        (compiler(tmp_path / "killed", KILLED), "the compiler left with status -9"),
        (compiler(tmp_path / "old", OLD), "does not compile: cc1plus: error: bad value"),
    ]):  # fmt: skip
        monkeypatch.setattr(made_in, "_building", [])
        monkeypatch.setenv("CXX", cxx)
        build._failed.clear()
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                assert list(generate_bytes(model, b"def ", max_new_bytes=decoder.WORTH, seed=1)) == plain
                for thread in made_in._building:
                    thread.join()
        (line,) = caplog.messages[i:]
        assert "NO KERNEL for decoding on a CPU" in line
        assert said in line
        left = {x.suffix for x in (tmp_path / "cache").glob("*")} - {".lock", ".failed"}
        assert not left, "nothing half-written stays"
    monkeypatch.setattr(made_in, "_building", [])
    monkeypatch.delenv("CXX")
    compiled = threading.Event()
    monkeypatch.setattr(made_in, "opened", lambda *_: compiled.wait(60) and "module")
    assert made_in.recorder_when_built() is None, "it does not wait"
    threading.Timer(0.2, compiled.set).start()
    assert made_in.recorder_when_built(wait=True).module == "module"
    assert "compiling what decodes on this CPU" in caplog.text


def test_without_the_sources_plain_pytorch_writes_and_one_line_says_so(monkeypatch, caplog):
    monkeypatch.setattr(made_in, "_ready", [])
    monkeypatch.setattr(made_in, "_building", [])
    monkeypatch.setattr(build, "targets", tuple)
    model, counts = LadderLM("e42", dim=32, depth=1).eval(), (8, decoder.WORTH, decoder.WORTH)
    texts = [list(generate_bytes(model, b"def ", max_new_bytes=count, seed=1)) for count in counts]
    for thread in made_in._building:
        thread.join()
    assert [len(text) for text in texts] == [*counts]
    (line,) = caplog.messages
    assert "NO KERNEL for decoding on a CPU" in line
    assert "the kernel sources are not installed: pip install ./csrc_common" in line


def test_of_processes_that_ask_at_once_one_compiles(module, tmp_path):
    there = build.find(made_in.extension(), build.local_arch(made_in.extension())).parent
    copying = compiler(tmp_path / "copying", f'sleep 0.5; cp {there}/"${{made##*/}}" "$made"')  # what the test compiled
    ask = "from elman_megakernel.steps.recorder import recorder_when_built as r; print(r(wait=True) is not None)"
    how = {"env": {**os.environ, "ELMAN_CACHE": str(tmp_path / "cache"), "CXX": copying}, "stdout": subprocess.PIPE}
    asking = [subprocess.Popen([sys.executable, "-c", ask], text=True, **how) for _ in range(2)]
    assert [process.communicate(timeout=120)[0] for process in asking] == ["True\n", "True\n"]
    made = [
        line.rpartition("/")[2] for line in (tmp_path / "copying" / "runs").read_text().split() if line.endswith(".so")
    ]
    assert sorted(name.partition("-")[0] for name in made) == ["elman_launch", "program"]


def test_of_threads_that_ask_at_once_one_compiles(monkeypatch):
    both = threading.Barrier(2)

    class Building(list):
        def __bool__(self):
            found = len(self) > 0
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.2)  # for the other to look, too
            return found

    building = Building()
    for name, value in {"_ready": [], "_building": building, "is_built": lambda: False}.items():
        monkeypatch.setattr(made_in, name, value)
    monkeypatch.setattr(made_in, "load_or_warn", lambda *_: "compiler")
    askers = [threading.Thread(target=made_in.recorder_when_built) for _ in range(2)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    assert len(building) == 1


def test_while_a_thread_records_the_others_compute_rows_as_always():
    like, found = torch.zeros(1, 4), []
    with torch.no_grad(), row_by_row():
        other = threading.Thread(target=lambda: found.append(torch.no_grad()(spare_rows)(1, like)))
        other.start()
        other.join()
        assert spare_rows(1, like) == 0
    assert found == [3]
