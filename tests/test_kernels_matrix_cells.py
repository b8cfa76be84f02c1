"""The matrix-state skeleton with other cells than E88's: its C++ loops, its GPU source on emulated threads, and nvcc."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from elman_authors.testing.kernel import need_host_compiler, need_nvcc
from linear_cells import CELLS as LINEAR
from linear_cells import GATED, KIMI, Made
from problems.fla_rules import RULES
from torch import Tensor

from elman_core.kernels import Maps, MatrixKernel
from elman_core.kernels.build import build
from elman_core.kernels.matrix import native
from elman_core.kernels.matrix.problems import case
from elman_core.kernels.matrix.spec import Size
from elman_core.kernels.spec import Case
from elman_core.kernels.verify import failures, verify
from elman_core.registry import ConfigError

f64, f32, bf16, f16 = torch.float64, torch.float32, torch.bfloat16, torch.float16


def decayed_by_line(s: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    return gate.sigmoid() * s + k * v


def tanh_last(s: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, last: Tensor) -> Tensor:
    new = decay * s + k * beta * (v - k.mT @ s)
    return torch.where(last != 0, new.tanh(), new)


def trapezoid(s: Tensor, k: Tensor, before: Tensor, v: Tensor, past: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return a * s + b * before * past + c * k * v


def _every_third(inputs: dict[str, Any], _: Mapping[str, Any]) -> None:
    inputs["last"] = (
        (torch.arange(inputs["last"].shape[1])[:, None] % 3 == 1).to(inputs["last"]).expand_as(inputs["last"])
    )


def written(s: Tensor, k: Tensor, v: Tensor, gate: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    return decay * s + k * beta * (gate * v - k.mT @ s)


DECAYED = Maps(("q", "k", "v"), ("q", "k"), ("mamba", "sigmoid"))
THREE = Maps((), ("k",), ("sigmoid",) * 3)
CELLS = LINEAR | {
    "written": Made(  # sixteen steps at once, without an option that says so
        written,
        counts="lines = 2, scalars = 2",
        flags="squashes = false, scalar_keep = true, delta = true",
        line="return {x.c[0], x.c[1] * (x.in[1] * x.in[0] - x.r)};",
        back="""const T b = x.c[1] * d.write;
    return {-b, {b * x.in[1], b * x.in[0]}, {d.keep, d.write * (x.in[1] * x.in[0] - x.r)}};""",
        declared={"lines": ("gate",), "scalars": ("decay", "beta"), "delta": True},
    ),
    "tanh_last": Made(  # several steps a token, of which the last has phi
        tanh_last,
        counts="scalars = 3, squash_scalar = 2",
        flags="scalar_keep = true",
        line="return {x.c[0], x.c[1] * (x.in[0] - x.r)};",
        back="""const T b = x.c[1] * d.write;
    return {-b, {b}, {d.keep, d.write * (x.in[0] - x.r)}};""",
        declared={"scalars": ("decay", "beta", "last"), "maps": (DECAYED,), "adjust": _every_third},
    ),
    "trapezoid": Made(  # two writes without a retrieval: Mamba-3
        trapezoid,
        counts="lines = 2, vectors = 1, second_vector = 0, scalars = 3",
        flags="retrieves = false, squashes = false, scalar_keep = true, backward_uses_r = false",
        line="return {x.c[0], x.c[2] * x.in[0], x.c[1] * x.in[1]};",
        back="return {T(0), {x.c[2] * d.write, x.c[1] * d.second}, {d.keep, x.in[1] * d.second, x.in[0] * d.write}};",
        declared={"vectors": ("before",), "lines": ("past",), "scalars": ("a", "b", "c"), "maps": (THREE,)},
    ),
    "made_up": Made(  # nothing is retrieved, and heads share their keys
        decayed_by_line,
        counts="lines = 2",
        flags="retrieves = false, squashes = false, backward_uses_r = false",
        line="return {Math::gate(x.in[1]).open, x.in[0]};",
        back="const auto a = Math::gate(x.in[1]);\n    return {T(0), {d.write, d.keep * a.open * a.shut}};",
        declared={"lines": ("gate",), "shared": ("q", "k")},
    ),
}
HOST = dict.fromkeys(CELLS, (case((2, 21, 2, 8, 6), f64, fused=True, masked=True, packed=True),)) | {
    "gated_deltanet": (
        case((2, 21, 2, 8, 8), f64, maps=GATED, fused=True, on=("write",), masked=True, packed=True),
        case((1, 17, 2, 4, 3), f64, on=("linear_state",), strided=True),
        case((1, 18, 2, 4, 3), f64, on=("linear_state", "write")),
    ),
    "kimi_delta": (case((2, 21, 2, 8, 6), f64, maps=KIMI, fused=True, masked=True),),
    "tanh_last": (case((2, 21, 2, 8, 6), f64, maps=DECAYED, fused=True, masked=True, packed=True),),
    "trapezoid": (case((2, 21, 2, 8, 6), f64, maps=THREE, masked=True, packed=True),),
    "made_up": (case((2, 21, 3, 8, 6), f64, strided=True, masked=True), case((1, 5, 1, 8, 6), f64)),
}
EMULATED = {
    "gated_deltanet": (case((2, 35, 3, 16, 16), bf16, maps=GATED, fused=True, on=("write",), masked=True),),
    "kimi_delta": (
        case((2, 20, 3, 16, 16), bf16, maps=KIMI, masked=True, packed=True),
        case((1, 18, 1, 28, 24), f16, wide=1),
        case((1, 18, 1, 128, 72), bf16, wide=1, masked=True, packed=True),
    ),
    "gdn2": (
        case((2, 20, 3, 16, 16), bf16, fused=True, masked=True, packed=True),
        case((1, 17, 1, 36, 20), f16, masked=True),
        case((1, 18, 1, 128, 128), bf16, wide=1, masked=True),
    ),
    "written": (case((1, 37, 1, 52, 128), bf16, masked=True, packed=True), case((1, 19, 1, 100, 24), f16)),
    "rwkv7": (
        case((2, 20, 3, 16, 16), bf16, fused=True, masked=True, packed=True),
        case((1, 18, 1, 32, 24), bf16, wide=0b101),
        case((1, 19, 2, 64, 64), bf16, wide=0b001, masked=True, packed=True),
        case((1, 18, 1, 128, 72), bf16, wide=0b001, packed=True),  # two blocks backward, one forward
        case((1, 18, 1, 8, 20), f32),
    ),
    "tanh_last": (
        case((2, 20, 3, 16, 16), bf16, maps=DECAYED, fused=True, masked=True, packed=True),
        case((1, 18, 2, 32, 40), bf16, packed=True),
        case((1, 18, 1, 64, 72), f16),
        case((1, 18, 1, 8, 20), f32, masked=True),
    ),
    "trapezoid": (
        case((2, 20, 3, 16, 16), bf16, maps=THREE, masked=True, packed=True),
        case((1, 18, 1, 128, 72), bf16, packed=True),
        case((1, 18, 1, 32, 44), f32, masked=True),
    ),
    "made_up": (
        case((2, 18, 3, 24, 17), bf16, bare=True),
        case((1, 9, 2, 36, 5), bf16, packed=True),
        case((1, 18, 2, 32, 20), f32),
    ),
}
e14, e75, e97 = (vars(pytest.importorskip(f"elman_{name}.op"))[name] for name in ("e14", "e75", "e97"))
e73, e74 = pytest.importorskip("elman_e73.op").full, pytest.importorskip("elman_e74.op").KERNELS
KEYS, GATED_BY_READ = Maps((), ("k",)), e74["retrieved_gate"]
SHIPPED = [  # whose loops on the host their own contracts check
    (e97, case((2, 35, 3, 16, 16), bf16, maps=e97.cell.maps[0], fused=True, on=("write",), masked=True, packed=True)),
    (e97, case((1, 34, 2, 32, 32), bf16, maps=e97.cell.maps[0])),
    (e97, case((2, 50, 3, 32, 32), bf16, maps=e97.cell.maps[0])),
    (e97, case((1, 20, 9, 32, 32), bf16, maps=e97.cell.maps[0])),  # blocks of five heads, of which the last has four
    (e97, case((1, 35, 11, 32, 32), bf16, maps=e97.cell.maps[0], fused=True, on=("write",), masked=True, packed=True)),
    (e97, case((2, 18, 1, 20, 7), f16, maps=e97.cell.maps[0], on=("linear_state",))),
    (e97, case((1, 18, 2, 16, 20), f32, maps=e97.cell.maps[1], masked=True, packed=True)),
    (e97, case((1, 17, 1, 64, 72), bf16, maps=e97.cell.maps[2])),
    (e75, case((2, 35, 3, 16, 16), bf16, maps=KEYS, masked=True, packed=True)),
    (e75, case((1, 40, 2, 32, 32), bf16, maps=KEYS)),
    (e75, case((1, 17, 1, 24, 17), f16)),
    (e75, case((1, 17, 1, 64, 40), bf16, masked=True, packed=True)),
    (e75, case((1, 18, 2, 16, 20), f32, masked=True)),
    (GATED_BY_READ, case((2, 35, 3, 16, 16), f32, maps=KEYS, masked=True)),  # fewer heads a block than usual
    (GATED_BY_READ, case((1, 18, 2, 16, 20), bf16, maps=KEYS, masked=True, packed=True)),
    (GATED_BY_READ, case((1, 18, 1, 32, 24), bf16, maps=KEYS)),  # keeps what was retrieved
    (GATED_BY_READ, case((2, 17, 1, 64, 72), bf16, maps=KEYS, masked=True, packed=True)),
    (e74["sized"], case((2, 20, 3, 16, 16), bf16, maps=KEYS, masked=True, packed=True)),
    (e74["sized"], case((1, 18, 1, 32, 24), bf16)),
    (e74["sized"], case((1, 17, 1, 64, 20), f16)),
    (e74["residual"], case((2, 20, 3, 16, 16), bf16, masked=True)),
    (e74["residual"], case((1, 18, 1, 32, 24), bf16)),
    (e74["residual"], case((1, 17, 1, 48, 20), bf16, masked=True, packed=True)),
    (e74["ntm"], case((2, 20, 3, 16, 16), bf16, maps=KEYS, masked=True, packed=True)),
    (e74["ntm"], case((1, 18, 1, 28, 24), f16)),
    (e14, case((2, 18, 3, 24, 17), bf16)),
    (e14, case((1, 9, 2, 64, 40), bf16, packed=True)),
    (e73, case((2, 35, 3, 16, 16), bf16, fused=True, masked=True, packed=True)),
    (e73, case((1, 18, 2, 32, 24), bf16)),
    (e73, case((1, 18, 1, 24, 20), f32, masked=True)),
]
PROBLEMS = [(name, problem) for name, problems in EMULATED.items() for problem in problems]
PROBLEMS += [(kernel.name, problem) for kernel, problem in SHIPPED]


@pytest.fixture(scope="session")  # an operator's name is taken for the life of a process
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, MatrixKernel]:
    found = {kernel.name: kernel for kernel, _ in SHIPPED}
    return found | {name: made.kernel(name, tmp_path_factory.mktemp(name)) for name, made in CELLS.items()}


@pytest.mark.parametrize("name", CELLS)
def test_the_loops_of_the_host_equal_the_reference(name: str, kernels: dict[str, MatrixKernel]) -> None:
    need_host_compiler()
    checked = name in ("gated_deltanet", "rwkv7")  # signatures of every kind
    report = verify(kernels[name].spec(), "host", cases=HOST[name], opcheck=checked)
    assert report.passed, "\n".join(failures(report))


def test_steps_without_tanh_on_a_cpu_equal_the_reference(kernels: dict[str, MatrixKernel]) -> None:
    need_host_compiler()
    problem = case((2, 21, 3, 12, 20), bf16, maps=DECAYED, fused=True, masked=True, packed=True)
    report = verify(kernels["tanh_last"].spec(), "cpu", cases=[problem])
    assert report.passed, "\n".join(failures(report))


@pytest.mark.parametrize(("name", "problem"), PROBLEMS, ids=str)
def test_the_gpu_source_equals_the_reference(name: str, problem: Case, kernels: dict[str, MatrixKernel]) -> None:
    need_host_compiler()
    report = verify(kernels[name].spec(), "emulated", cases=[problem], opcheck=False)
    assert report.passed, "\n".join(failures(report))


def test_few_heads_with_vectors_are_shared_by_more_blocks(
    kernels: dict[str, MatrixKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    need_host_compiler()
    monkeypatch.setenv("EMULATED_MULTIPROCESSORS", "2")
    cell, problem = kernels["kimi_delta"].cell, case((1, 18, 1, 128, 72), bf16, wide=1, masked=True)
    report = verify(kernels["kimi_delta"].spec(), "emulated", cases=[problem], opcheck=False)
    assert report.passed, "\n".join(failures(report))
    size = Size(128, 72, bf16, cell.form(Maps(), (), True, wide=1))
    module = native.load(cell, "cuda", size, None)
    assert [module.ask("parts", batch, 1) for batch in (1, 2)] == [2, 1]


def test_elman_check_runs_large_heads_of_every_cell(kernels: dict[str, MatrixKernel]) -> None:
    for kernel in kernels.values():
        assert any(problem.sizes["N"] > 32 for problem in kernel.spec().emulated), kernel.name


def test_two_steps_a_token_are_gated_delta_product(kernels: dict[str, MatrixKernel]) -> None:
    """With the first of them the state decays, and the second is read: outputs and every gradient."""
    need_host_compiler()
    draw, (B, T, H, N, V) = torch.Generator().manual_seed(0), (2, 9, 2, 8, 6)
    q, k, v, decay, beta = (
        torch.randn(B, T, *last, generator=draw, dtype=f64) for last in ((H, N), (2, H, N), (2, H, V), (H,), (2, H))
    )
    leaves = [x.requires_grad_() for x in (q, F.normalize(k, dim=-1), v, decay.sigmoid(), 2 * beta.sigmoid())]
    q, k, v, decay, beta = leaves
    s, outputs = q.new_zeros(B, H, N, V), []
    for t in range(T):
        s = decay[:, t, :, None, None] * s
        for i in range(2):
            kept, by = k[:, t, i, :, :, None], beta[:, t, i, :, None, None]
            s = s + by * kept * (v[:, t, i, :, None] - kept.mT @ s)
        outputs.append((q[:, t, :, None] @ s)[..., 0, :])
    both = (torch.stack((q, q), 2), k, v, torch.stack((decay, torch.ones_like(decay)), 2), beta)
    o, last = kernels["gated_deltanet"](
        *(x.flatten(1, 2) for x in both), linear_state=True, maps=Maps(), backend="host"
    )
    wanted, found = (
        [*each, *torch.autograd.grad(sum(x.sin().sum() for x in each), leaves)]
        for each in ((torch.stack(outputs, 1), s), (o[:, 1::2], last))
    )
    for actual, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(actual, right, rtol=1e-12, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("name", RULES)
def test_flas_chunks_follow_the_rule(
    name: str, kernels: dict[str, MatrixKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """fla's kernels in bfloat16, outputs and every gradient, beside ours in float32, to the 2 % that fla's own tests allow."""
    gdn = pytest.importorskip("elman_baselines.gdn.op")
    pytest.importorskip("fla")
    gdn.library.functions()  # lifts fla's refusal for keys of 128
    autotuner = importlib.import_module("triton.runtime.autotuner").Autotuner
    monkeypatch.setattr(autotuner, "prune_configs", lambda self, _: self.configs[:1])  # tuning would take minutes
    rule, (B, T, H, K, V) = RULES[name], (2, 100, 2, 128, 64)
    x = rule.draw(B, T, H, K, V, bf16, "cuda")
    leaves = [*x.values(), 0.4 * torch.randn(B, H, K, V, device="cuda")]
    for leaf in leaves:
        leaf.requires_grad_()
    wide = {n: value.float() for n, value in x.items()}
    ours = kernels[name](wide["q"], wide["k"], state_BHNV=leaves[-1], maps=Maps(), backend="cuda", **rule.ours(wide))
    theirs = rule.theirs("chunk", x, leaves[-1])
    dys = [torch.randn_like(o).to(bf16).float() for o in ours]
    found, expected = (
        [
            *(o.detach() for o in outs),
            *torch.autograd.grad(outs, leaves, [dy.to(o.dtype) for dy, o in zip(dys, outs, strict=True)]),
        ]
        for outs in (theirs, ours)
    )
    for which, actual, wanted in zip(("o", "S", *x, "S0"), found, expected, strict=True):
        error = float((actual.float() - wanted.float()).norm() / wanted.float().norm())
        assert error < 0.02, (which, error)


def test_it_compiles_for_a_gpu(tmp_path: Path) -> None:
    need_nvcc()
    assert build(GATED_BY_READ.spec().extension("cuda"), "sm_90", tmp_path).is_file()


def test_other_inputs_than_the_cells_are_one_line() -> None:
    """From the call."""
    q, v, slope = torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 3), torch.zeros(1, 3)
    gated = GATED_BY_READ
    for inputs, more, said in (
        ((), {"v": v, "b_g": slope}, "gate is missing"),
        (
            (v, slope),
            {},
            r"takes v \(B, T, H, V\), gate \(B, T, H, V\), b_g \(H, V\) .*; it got \(1, 2, 1, 3\), \(1, 3\)$",
        ),
        ((v, v, slope, slope), {}, r"it got \(1, 2, 1, 3\), \(1, 2, 1, 3\), \(1, 3\), \(1, 3\)$"),
        ((v, v, slope), {"beta": v}, "has the options linear_state, not 'beta'"),
    ):
        with pytest.raises(ConfigError, match=said):
            gated(q, q, *inputs, **more)
    with pytest.raises(ConfigError, match=r"maps\.silu has q, k, v, gate, not 'slope'"):
        gated(q, q, v, v, slope, maps=Maps(("slope",)))
