"""One step of a matrix state in a kernel of its own: its source on emulated threads, and which calls run it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from elman_authors import grids
from elman_authors.testing.kernel import need_host_compiler, need_nvcc
from linear_cells import GATED, KIMI
from test_kernels_matrix_cells import CELLS, DECAYED

from elman_core.kernels import Maps, MatrixKernel, dispatch
from elman_core.kernels.build import build
from elman_core.kernels.matrix.problems import case
from elman_core.kernels.spec import Case, KernelSpec
from elman_core.kernels.verify import failures, verify
from elman_core.registry import KernelError

f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
SHIPPED: dict[str, Any] = {
    name: pytest.importorskip(f"elman_{name}.op") for name in ("e88", "e97", "e75", "e14", "e73", "e74")
}
e88, e97 = SHIPPED["e88"].e88, SHIPPED["e97"].e97
FUSED: dict[str, Any] = {"maps": e88.cell.maps[0], "fused": True, "on": ("write",)}
KEYS = Maps((), ("k",))
KERNELS: dict[str, MatrixKernel] = {"e88": e88} | {name: vars(SHIPPED[name])[name] for name in ("e97", "e75", "e14")}
KERNELS |= {"e73": SHIPPED["e73"].full} | {f"e74 {name}": kernel for name, kernel in SHIPPED["e74"].KERNELS.items()}
PROBLEMS = [
    ("e88", case((4, 1, 3, 16, 16), bf16, **FUSED, masked=True, packed=True)),
    ("e88", case((1, 1, 5, 128, 36), bf16, **FUSED)),  # wide blocks, the last with four columns
    ("e88", case((1, 1, 1, 128, 16), bf16, on=("linear_state",), bare=True)),  # narrow ones
    ("e88", case((1, 1, 2, 96, 33), f16, masked=True)),  # odd columns, and rows that are no power of two
    ("e88", case((4, 1, 1, 124, 10), f32, **FUSED, masked=True, packed=True, strided=True)),
    ("e88", case((3, 1, 1, 4, 3), f32, on=("write",), packed=True)),
    ("gated_deltanet", case((2, 1, 2, 64, 72), f32, maps=GATED, fused=True, on=("linear_state", "write"))),
    ("kimi_delta", case((4, 1, 1, 128, 40), bf16, maps=KIMI, wide=1, masked=True, packed=True)),
    ("gdn2", case((2, 1, 1, 36, 20), f32, fused=True)),
    ("rwkv7", case((3, 1, 2, 64, 64), bf16, wide=0b101, masked=True)),
    ("rwkv7", case((1, 1, 1, 32, 7), f32)),
    ("trapezoid", case((4, 1, 2, 20, 24), f32, masked=True, packed=True)),  # three scalars, nothing is retrieved
    ("tanh_last", case((2, 1, 2, 16, 16), bf16, maps=DECAYED, fused=True)),
    ("made_up", case((3, 1, 3, 24, 17), f32, strided=True)),  # heads share keys
    ("e97", case((4, 1, 2, 32, 32), bf16, maps=e97.cell.maps[0], fused=True, on=("write",), masked=True, packed=True)),
    ("e75", case((2, 1, 2, 24, 20), f32, maps=KEYS)),  # learned constants that are folded
    ("e14", case((4, 1, 3, 24, 17), f32, masked=True, packed=True)),  # heads share lines
    ("e73", case((2, 1, 1, 16, 16), bf16, fused=True)),
    *((f"e74 {name}", case((4, 1, 2, 40, 20), f32, masked=True, packed=True)) for name in SHIPPED["e74"].KERNELS),
]


@pytest.fixture(scope="session")  # an operator's name is taken for the life of a process
def specs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, KernelSpec]:
    made = {name: CELLS[name].kernel(f"one_{name}", tmp_path_factory.mktemp(name)) for name in CELLS}
    return {name: kernel.specs()[1] for name, kernel in (KERNELS | made).items()}


@pytest.mark.parametrize(("name", "problem"), PROBLEMS, ids=str)
def test_a_step_equals_the_float64_reference(name: str, problem: Case, specs: dict[str, KernelSpec]) -> None:
    need_host_compiler()
    report = verify(specs[name], "emulated", cases=[problem], opcheck=False)
    assert report.passed, "\n".join(failures(report))
    [state] = [row.error for row in report.rows if row.tensor == "S"]
    assert state < 2e-6, "it is float32, without tensor cores"


def test_what_elman_check_runs_passes_with_its_operator() -> None:
    need_host_compiler()
    report = grids.verify(e88.specs()[1], "emulated")
    assert report.passed, "\n".join(failures(report))


def asked(steps: int = 1) -> list[str]:
    """The kernels that a call would run on a GPU."""
    x = torch.empty(2, steps, 3, 8, device="meta", dtype=bf16)
    with dispatch.asking() as found:
        e88(x, x, x, x[..., 0].float(), maps=Maps())
    return [name for name, *_ in found]


def test_a_call_of_one_step_without_gradients_runs_it() -> None:
    with torch.no_grad():
        assert asked() == ["e88_step", "e88"]
        assert asked(steps=2) == ["e88"]
    assert asked() == ["e88"]


def test_a_first_use_verifies_few_blocks_and_many() -> None:
    form = e88.cell.form(Maps(), [False], False)
    step = dispatch._kernels["e88_step"]
    few, many = step.cases(bf16, 128, 256, form)
    assert few.sizes["B"] * few.sizes["H"] == 1, "a wider state has wide blocks on a GPU with few multiprocessors"
    assert many.sizes["B"] * 256 // 32 == 3 * 160
    assert many.masked
    assert many.options["packed"]
    [module] = set(step.builds("sm_90", bf16, 128, 256, form))
    assert module.binding.name == "matrix_step_cuda.cu"


@pytest.mark.parametrize("shape", [(1, 2, 1, 4), (1, 1, 1, 4)], ids=["two steps", "gradients"])
def test_it_takes_neither_two_steps_nor_gradients(shape: tuple[int, ...]) -> None:
    need_host_compiler()
    x = torch.randn(shape).requires_grad_(shape[1] == 1)
    with pytest.raises(KernelError, match="takes one time step and saves nothing"):
        e88(x, x, x, x[..., 0], maps=Maps(), backend="step")  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 64])
def test_steps_in_a_captured_graph_equal_the_reference(batch: int) -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(batch, 1, 5, n, generator=draw).to("cuda", bf16) for n in (64, 64, 128))
    decay = torch.rand(batch, 1, 5, generator=draw).cuda()
    first = torch.randn(batch, 5, 64, 128, generator=draw).cuda()
    how: Any = {"maps": Maps(("q", "k", "v"), ("q", "k"))}

    def steps(backend: Any = "auto") -> tuple[torch.Tensor, torch.Tensor]:
        o, state = e88(q, k, v, decay, state_BHNV=first, backend=backend, **how)
        for _ in range(8):
            o, state = e88(q, k, v, decay, state_BHNV=state, backend=backend, **how)
        return o, state

    with torch.no_grad():
        wanted = steps("reference")
        steps()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = steps()
        graph.replay()
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(found[0], wanted[0], rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_it_compiles_for_a_gpu(arch: str, tmp_path: Path) -> None:
    need_nvcc()
    assert build(e88.specs()[1].extension("cuda"), arch, tmp_path).is_file()
