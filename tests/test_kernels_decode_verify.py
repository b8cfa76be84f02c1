"""Verification of the kernels of few rows: their grids on emulated threads, faults, first use, stamps, and what is refused."""

import dataclasses
import logging
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import elman_e1.op
import elman_e42.op
import emulated_decode
import pytest
import torch
from cpu_graph import CpuRecorder
from elman_authors import grids
from elman_authors.cli import doctor
from torch import nn

from elman_core.cli import main
from elman_core.generation import Sampling
from elman_core.generation.decoder import WARM, Decoder
from elman_core.generation.prefill import prefill
from elman_core.kernels import build, dispatch, verify_cache
from elman_core.kernels.decode import native
from elman_core.kernels.decode import op as decode
from elman_core.kernels.decode.spec import DTYPES, LINEAR, case
from elman_core.kernels.verify import Report, failures, verify
from elman_core.model import LadderLM
from elman_core.nn import is_bare, linear, linears, scaled_once
from elman_core.registry import KernelError

bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32


compiled, real_module = emulated_decode.compiled, native.module


@pytest.fixture
def emulated(compiled, monkeypatch):
    """The kernels run on tensors of the CPU, wherever they would on a GPU."""
    monkeypatch.setattr(native, "module", compiled)
    return compiled


@pytest.fixture
def taken(emulated, monkeypatch, tmp_path):
    """`takes…` say so for tensors of the CPU too; the list of what is then verified at first use, in a cache of its own.
    A test with it runs in inference mode."""
    verified = []

    def on_cpu(spec, _target, cases, opcheck):
        verified.append((spec.name, cases))
        assert not opcheck
        return dataclasses.replace(verify_emulated(spec, cases), target="cuda")

    def alone(x):
        return x.dtype in DTYPES and not torch.is_grad_enabled()

    monkeypatch.setattr(native, "alone", alone)
    monkeypatch.setattr(verify_cache, "verify", on_cpu)
    monkeypatch.setattr(verify_cache, "_used", {})
    monkeypatch.setattr(dispatch, "_decided", {})
    monkeypatch.setenv("ELMAN_CACHE", str(tmp_path))
    monkeypatch.setattr(verify_cache.build, "local_arch", lambda _extension: "sm_90")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "emulated threads")
    right = verify_cache.stamp
    monkeypatch.setattr(verify_cache, "stamp", lambda spec, target="cuda", arch="sm_90": right(spec, target, arch))
    monkeypatch.delenv("ELMAN_VERIFY", raising=False)
    with torch.inference_mode():
        yield verified


def verify_emulated(spec, cases=None, opcheck=False, call=None):
    """With the modules of `compiled`, beside which nothing is built."""
    spec = dataclasses.replace(spec, portable=("emulated",), module=None, call=call or spec.call)
    if cases is None:
        cases = list(emulated_decode.small_cases()) if spec.name == "decode" else spec.emulated
    return verify(spec, "emulated", cases=cases, opcheck=opcheck)


def specs():
    return [decode.Shared().spec(), elman_e1.op.e1._step.spec(), elman_e42.op.e42._step.spec()]


@pytest.mark.parametrize("spec", specs(), ids=lambda s: s.name)
def test_every_kernel_passes_its_grid_on_emulated_threads(spec, emulated):
    report = verify_emulated(spec, opcheck=True)
    assert report.passed, list(failures(report))
    assert not any(row.tensor.startswith("d ") for row in report.rows), "there are no gradients"
    wanted = {"linear", "linears 0", "linears 4", "n", "stream", "drawn", "shown", "marked"}
    assert {row.tensor for row in report.rows} >= (wanted if spec.name == "decode" else {"y", "h"})


@pytest.mark.parametrize("spec", [*specs(), elman_e1.op.e1.spec()], ids=lambda s: s.name)
def test_grids_are_fixed_lists_without_repeats(spec):
    for target, grid, low, high in (("cuda", "quick", 15, 60), ("cuda", "full", 100, 500)):
        cases = [str(c) for c in grids.cases(spec, target, grid)]
        assert len(set(cases)) == len(cases)
        assert low <= len(cases) <= high, len(cases)


def test_rows_too_wide_for_shared_memory_take_the_kernel_that_does_not_hold_them(emulated):
    report = verify_emulated(decode.Shared().spec(), [case("linear", (8, 14400, 8), bf16, bias=True)])
    assert report.passed, list(failures(report))


def cuda_cases():
    for spec in specs():
        for each in grids.cases(spec, "cuda"):
            yield pytest.param(spec, each, id=f"{spec.name} {each}")


@pytest.mark.gpu
@pytest.mark.parametrize(("spec", "case"), list(cuda_cases()))
def test_every_kernel_passes_its_grid_on_a_gpu(spec, case, monkeypatch):
    monkeypatch.setenv("ELMAN_KERNELS", "require")
    report = verify(spec, "cuda", cases=[case])
    assert report.passed, list(failures(report))


@pytest.mark.gpu
def test_first_uses_on_a_gpu_pass_and_are_stamped_without_a_compiler(monkeypatch, tmp_path):
    """All of a model's; the compiler is asked before, and what it made is found in a folder that was another's."""
    monkeypatch.setenv("ELMAN_KERNELS", "require")
    monkeypatch.delenv("ELMAN_VERIFY", raising=False)
    x, h = torch.zeros(1, 1536, dtype=bf16, device="cuda"), torch.zeros(1, 1536, device="cuda")
    w, weight = torch.zeros(1536, 1536, dtype=bf16, device="cuda"), torch.ones(1536, dtype=bf16, device="cuda")

    def use():
        assert decode.takes(x, w)
        assert decode.takes(x, w[:256])
        assert decode.takes_norm(x, h, weight, bf16)
        assert decode.takes_draw(x[:, :256])
        assert elman_e42.op.e42._step.takes(x[None], w, w)

    with torch.inference_mode():
        for folder in ("compiles", "verifies"):
            monkeypatch.setattr(dispatch, "_decided", {})
            monkeypatch.setenv("ELMAN_CACHE", ":".join(map(str, [tmp_path / folder, tmp_path / "compiles"])))
            if folder == "verifies":
                for stamped in (tmp_path / "compiles" / "verified").iterdir():
                    stamped.unlink()
                monkeypatch.setattr(build, "_compile", Mock(side_effect=AssertionError("compiled again")))
            use()
    assert all(verify_cache.stamp(s).passed for s in specs() if s.name != "e1_step")


# First use ------------------------------------------------------------------------------------------------------------


def test_a_size_is_verified_once_with_the_fewest_and_the_most_rows(taken):
    x, w = torch.zeros(2, 40, dtype=bf16), torch.zeros(24, 40, dtype=bf16)
    assert decode.takes(x, w)
    assert decode.takes(x[:1], w)
    [(name, cases)] = taken
    assert (name, [c.sizes for c in cases]) == ("decode", [{"B": b, "K": 40, "N": 24} for b in (1, 8)])
    assert decode.takes(torch.zeros(9, 40, dtype=bf16), w)
    assert [c.sizes["B"] for c in taken[1][1]] == [9, 16]
    found = verify_cache.stamp(decode.Shared().spec())
    assert found is not None
    assert (found.passed, len(found.extra)) == (True, 4)
    dispatch._decided.clear()  # as another process
    assert decode.takes(x, w)
    assert len(taken) == 2
    assert all(not use["skipped"] and use["stamp"]["passed"] for use in verify_cache.used().values())


def test_every_kind_has_a_first_use_that_passes(taken):
    x, weight = torch.zeros(1, 40, dtype=bf16), torch.ones(40, dtype=bf16)
    w = torch.zeros(40, 40, dtype=bf16)
    assert decode.takes(x, w, w[:9], w[:20])
    assert decode.takes_norm(x, None, weight, bf16)
    assert decode.takes_draw(torch.zeros(1, 256, dtype=f32))
    assert elman_e42.op.e42._step.takes(x[None], w, w)
    assert [name for name, _ in taken] == ["decode"] * 3 + ["e42_step"]
    assert [c.has("tied") for c in taken[-1][1]] == [True, False]
    assert all(verify_cache.stamp(spec).passed for spec in specs() if spec.name != "e1_step")


def test_a_cache_that_cannot_be_written_stops_nobody(taken, monkeypatch, caplog):
    full = KernelError("no cache folder can be written")
    monkeypatch.setattr(verify_cache, "build", Mock(wraps=verify_cache.build, writable_cache=Mock(side_effect=full)))
    x, w = torch.zeros(2, 40, dtype=bf16), torch.zeros(24, 40, dtype=bf16)
    with caplog.at_level(logging.WARNING):
        assert decode.takes(x, w)
        assert decode.takes(x, w)
    assert len(taken) == 1
    assert [r.message for r in caplog.records] == [
        "elman: no cache folder can be written; without it every process verifies again"
    ]


def test_a_compiler_that_fails_is_asked_once(taken, monkeypatch, caplog):
    compiler = Mock(side_effect=KernelError("no nvcc"))
    monkeypatch.setattr(native, "module", real_module)
    monkeypatch.setattr(build, "_compile", compiler)
    monkeypatch.setenv("ELMAN_KERNELS", "auto")
    x, w = torch.zeros(2, 40, dtype=bf16), torch.zeros(24, 40, dtype=bf16)
    with caplog.at_level(logging.WARNING):
        assert not any(decode.takes(x, w[:n]) for n in (8, 16, 8, 16))
    compiler.assert_called_once()
    monkeypatch.setenv("ELMAN_KERNELS", "off")
    assert not decode.takes(x, w)


@pytest.mark.usefixtures("taken")
def test_more_maps_than_a_launch_takes_are_two(monkeypatch):
    modules = [nn.Linear(40, outputs, bias=False, dtype=bf16) for outputs in (24, 9, 24, 16, 8, 5, 17)]
    x = torch.randn(2, 1, 40).to(bf16)
    launched = Mock(wraps=decode.linears)
    with torch.no_grad():
        linears(modules, x)  # verified at the first use
        monkeypatch.setattr(decode, "linears", launched)
        found = linears(modules, x)
    assert [len(call.args[1]) for call in launched.call_args_list] == [5, 2]
    for module, y in zip(modules, found, strict=True):
        torch.testing.assert_close(y, module(x), rtol=2e-2, atol=2e-2)


def test_nothing_is_verified_for_the_first_time_while_a_step_is_recorded(taken):
    torch.manual_seed(0)
    model = LadderLM("e42", dim=32, depth=1).eval().to(bf16)
    counts = []

    class Watching(CpuRecorder):
        def record(self, run):
            counts.append(len(taken))
            made = super().record(run)
            counts.append(len(taken))
            return made

    seen = torch.zeros(1, 256, dtype=torch.bool)
    with scaled_once(model):
        cache, logits = prefill(model, b"a long enough prompt, " * 4)
        recorder = Watching()
        decoder = Decoder(model, cache, logits, seen, Sampling(), 0, recorder)
        for number, _ in enumerate(decoder.bytes(20)):
            assert number or taken, "the first byte was drawn by the kernel"
    assert recorder.replays > 0
    assert counts[0] == counts[1] > WARM
    assert {name for name, _ in taken} == {"decode", "e42_step"}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        random = torch.Generator().manual_seed(0)
        self.w, self.v = (nn.Parameter(torch.randn(n, 40, generator=random).to(bf16) / 8) for n in (40, 24))
        self.gains, self.bias = nn.Parameter(torch.ones(40, dtype=bf16)), nn.Parameter(torch.ones(24, dtype=bf16))

    def forward(self, x, h):
        step = elman_e42.op.e42._step
        assert decode.takes(x, self.v, bias=self.bias)
        assert decode.takes(x, self.w, self.v)
        assert decode.takes_norm(x, None, self.gains, bf16)
        first, second = decode.linears(x, [self.w, self.v])
        n, _ = decode.norm(first, None, self.gains, 1e-5)
        assert step.takes(n[None], self.w, self.w)
        y, last = step(n[None], self.w, None, self.w, h)
        return decode.linear(x, self.v, self.bias, 8), second, y, last


@pytest.mark.parametrize("dynamic", [None, True])
def test_one_graph_for_torch_compile_whatever_is_dynamic(dynamic, taken):
    torch._dynamo.reset()
    model = Model()
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=dynamic)
    with torch.no_grad():
        for rows in (3, 5, 12):
            x, h = torch.randn(rows, 40).to(bf16), torch.randn(rows, 40)
            for made, wanted in zip(compiled(x, h), model(x, h), strict=True):
                assert torch.equal(made, wanted)
    assert len({str(cases) for _, cases in taken}) == len(taken), "each size once"


# What is refused, or left to another way --------------------------------------------------------------------------------


def test_tensors_that_do_not_fit_are_left_to_torch(taken):
    x, w = torch.zeros(2, 40, dtype=bf16), torch.zeros(24, 40, dtype=bf16)
    bias = torch.zeros(24, dtype=bf16)
    assert decode.takes(x, w, bias=bias)
    assert not decode.takes(x[:, :32], w), "fewer columns than the weight has"
    assert not decode.takes(x, w, bias=bias.float())
    assert not decode.takes(x, w, bias=bias[:8])
    assert not decode.takes(x, *[w] * 6)
    assert not decode.takes_norm(x, None, torch.ones(39, dtype=bf16), bf16)
    assert not decode.takes_norm(x, torch.zeros(40), torch.ones(40, dtype=bf16), bf16), "a stream of one row"
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        linear(nn.Linear(40, 8, dtype=bf16), x[:, :32])


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda x, w, b: decode.linear(x, w[:, :32], b), r"weight must be \(24, 40\), not \(24, 32\)"),
        (lambda x, w, b: decode.linear(x, w, b.float()), "bias has the wrong dtype, torch.float32"),
        (lambda x, w, b: decode.linear(x[:, :36], w[:, :36].contiguous(), b), "the columns of x must be a multiple of 8"),
        (lambda x, w, _: decode.linears(x, [w, w.half()]), r"map\[0\] has the wrong dtype, torch.float16"),
    ],
)  # fmt: skip
def test_an_operator_does_not_read_beyond_its_tensors(call, says, emulated):
    x, w, b = torch.zeros(2, 40, dtype=bf16), torch.zeros(24, 40, dtype=bf16), torch.zeros(24, dtype=bf16)
    with pytest.raises(KernelError, match=says):
        call(x, w, b)


def test_a_step_refuses_a_state_or_projection_that_does_not_fit(emulated):
    step = elman_e42.op.e42._step
    x, w, h = torch.zeros(1, 2, 40, dtype=bf16), torch.zeros(40, 40, dtype=bf16), torch.zeros(2, 40)
    with pytest.raises(KernelError, match=r"h must be \(2, 40\), not \(1, 40\)"):
        step(x, w, None, w, h[:1])
    with pytest.raises(KernelError, match=r"e42_step_decode_bfloat16.*: weight has the wrong dtype"):
        step(x, w.float(), None, w, h)


def test_a_strided_bias_and_a_slice_of_a_weight_are_read_as_they_are(emulated):
    random = torch.Generator().manual_seed(0)
    x, wide = (torch.randn(n, 48, generator=random).to(bf16) for n in (3, 50))
    bias = torch.randn(64, generator=random).to(bf16)
    w, b = wide[1:33], bias[::2]
    assert torch.equal(decode.linear(x, w, b), decode.linear(x, w.clone(), b.clone()))
    assert torch.equal(decode.linear(x[:, 8:], w[:, 8:]), decode.linear(x[:, 8:].clone(), w[:, 8:].clone()))


def test_v_that_begins_where_w_does_is_not_taken_for_w(emulated):
    random = torch.Generator().manual_seed(0)
    step, w = elman_e42.op.e42._step, torch.randn(40, 40, generator=random).to(bf16)
    v, x, h = w.T, torch.randn(1, 2, 40, generator=random).to(bf16), torch.zeros(2, 40)
    assert v.data_ptr() == w.data_ptr()
    assert torch.equal(step(x, v, None, w, h)[0], step(x, v.clone(), None, w, h)[0])


def test_a_quantised_weight_is_left_to_its_module():
    class Quantised(torch.Tensor):
        pass

    module = nn.Linear(8, 8)
    assert is_bare(module)
    module.weight = nn.Parameter(module.weight.detach().as_subclass(Quantised))
    assert not is_bare(module)


def test_noise_and_logits_of_any_layout_draw_the_same(emulated):
    random = torch.Generator().manual_seed(0)
    logits, waits = torch.randn(5, 64, generator=random), torch.empty(5, 64).exponential_(generator=random)
    draw = partial(decode.draw, temperature=1.0, top_p=1.0)
    drawn = []
    for turn in (lambda t: t, lambda t: t.T.contiguous().T):
        seen = torch.zeros(5, 64, dtype=torch.bool)
        into, shown = torch.empty(5, dtype=torch.long), torch.empty(5, dtype=torch.long)
        draw(turn(logits), turn(waits), seen, into, shown, penalty=1.0, top_k=2**40)
        drawn.append(into)
    assert torch.equal(*drawn)
    with pytest.raises(KernelError, match="drawn does not lie in memory"):
        draw(logits, waits, seen, into.repeat(2)[::2], shown, penalty=1.0, top_k=0)
    with pytest.raises(KernelError, match=r"seen must be \(5, 64\), not \(1, 64\)"):
        draw(logits, waits, seen[:1], into, shown, penalty=1.1, top_k=0)
    with pytest.raises(KernelError, match="needs waits"):
        draw(logits, None, seen, into, shown, penalty=1.0, top_k=0)


def test_weights_that_stay_and_have_not_changed_are_read_early(emulated, monkeypatch):
    early = []
    monkeypatch.setattr(native, "_may_begin_early", lambda _device: True)
    module = emulated(None, LINEAR, bf16)

    def run(function, **given):
        early.append(bool(given["early"]))
        module.run(function, **given)

    monkeypatch.setattr(native, "module", lambda *_: SimpleNamespace(run=run))
    x, w = torch.zeros(1, 16, dtype=bf16), nn.Parameter(torch.zeros(8, 16, dtype=bf16))
    with torch.inference_mode():
        for _ in range(2):
            decode.linear(x, w)
        w.add_(1)
        for _ in range(2):
            decode.linear(x, w)
        for _ in range(2):
            decode.linear(x, w.clone())
    assert early == [False, True, False, True, False, False]


# Commands -------------------------------------------------------------------------------------------------------------


def test_without_a_gpu_there_is_nothing_to_verify_of_decoding(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main(["verify", "decode"]) == 5
    assert "nothing was checked" in capsys.readouterr().err
    for name in ("decode", "e42_step"):
        for command in ("verify", "build"):
            assert main([command, name, "--backend", "host"]) == 5
            assert f"{name} has no back end 'host'; it has: cuda" in capsys.readouterr().err
        assert main(["verify", name, "--backend", "cuda"]) == 5
        elsewhere = (
            ", and it runs nowhere else" if name == "decode" else f"; type `elman verify {name} --backend torch`"
        )
        assert f"{name}: no GPU here{elsewhere}" in capsys.readouterr().err


def test_the_doctor_says_of_each_kernel_of_decoding_whether_it_was_verified(taken, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    [row] = doctor._decoding()
    assert row["is"] == "cuda kernel decode not verified: elman verify decode"
    verify_cache.save(decode.Shared().spec(), Report("decode", "cuda", "quick", cases=1))
    assert doctor._decoding()[0]["is"].startswith("cuda kernel decode verified, quick grid")
    said = doctor._stamps("e42", [elman_e42.op.e42.spec(), elman_e42.op.e42._step.spec()])
    assert (
        said == ", cuda kernel not verified: elman verify e42, cuda kernel e42_step not verified: elman verify e42_step"
    )
