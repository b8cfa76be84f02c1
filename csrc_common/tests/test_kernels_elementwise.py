"""The elementwise skeleton against autograd in float64: loops on the host, the GPU source on emulated threads, and a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import elman_csrc
import pytest
import torch
from elementwise_helpers import Module, Problem, Step, reference, too_far
from elman_authors.testing.kernel import need_gpu, need_host_compiler, need_nvcc
from emulated import LIBRARY, compile_emulated
from torch import Tensor

from elman_core.kernels.build import Extension, build, local_arch

f64, f32, bf16, f16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
TANH = 2**-11  # relative error of the hardware's tanh, which 16-bit storage takes
CODES = {f32: "1", bf16: "2", f16: "3"}


def gated_value(h: list[Tensor], x: list[Tensor], p: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    f = torch.sigmoid(x[0])
    new = f * h[0] + torch.sigmoid(-x[0]) * torch.tanh(x[1]) * torch.sigmoid(p[0] * h[0] + p[1])
    return [new], new * torch.nn.functional.silu(new)


def diagonal_lstm(h: list[Tensor], x: list[Tensor], p: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    i, f, o = (torch.sigmoid(x[k] + p[k] * h[0]) for k in range(3))
    c = f * h[1] + i * torch.tanh(x[3] + p[3] * h[0])
    return [o * torch.tanh(c), c], o * torch.tanh(c)


Emulated = Callable[[str, torch.dtype], Module]
STEPS: dict[str, Step] = {"GatedValue": gated_value, "DiagonalLstm": diagonal_lstm}
CELLS = pytest.mark.parametrize("cell", STEPS)
PROBLEMS = [
    Problem(1, 2, 3),
    Problem(37, 3, 5, masked=True, starts=True, learned=True),
    Problem(161, 3, 136, sliced=True),  # two channels a lane; the last tile is not full
    Problem(150, 1, 64, starts=True),  # one channel a lane, in pieces of 16 bytes
    Problem(70, 4, 24, masked=True, starts=True, learned=True, sliced=True),
]
ON_A_GPU = [
    *PROBLEMS,
    Problem(515, 33, 1024, sliced=True),
    Problem(130, 70, 640, masked=True, starts=True, learned=True),
]


def extension(cell: str, target: str, dtype: torch.dtype = f32) -> Extension:
    return Extension(
        f"elementwise_{cell}_{target}",
        elman_csrc.get_bindings() / ("elementwise_host.cpp" if target == "host" else "elementwise_cuda.cu"),
        include=(elman_csrc.get_include(),),
        header=Path(__file__).parent / "elementwise_cells.h",
        defines=(
            ("ELMAN_CELL", f"elman::made_up::{cell}"),
            *((("ELMAN_DTYPE", CODES[dtype]),) if target == "cuda" else ()),
        ),
        python=False,
    )


def check(module: Module, step: Step, problem: Problem, dtype: torch.dtype, device: str = "cpu") -> None:
    given = problem.inputs(module.counts, dtype, device)
    found = module.run(given)
    single = reference(step, given, f64 if dtype == f64 else f32)
    more = TANH if device == "cuda" and dtype in (bf16, f16) else 0.0
    assert not too_far(found, single, reference(step, given), more)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    need_host_compiler()
    folder = tmp_path_factory.mktemp("elementwise")
    made: dict[tuple[str, torch.dtype], Module] = {}

    def module(cell: str, dtype: torch.dtype) -> Module:
        if (cell, dtype) not in made:
            given, path = extension(cell, "cuda", dtype), folder / f"{cell}_{CODES[dtype]}.so"
            compile_emulated(given, given.binding, path, *LIBRARY)
            made[cell, dtype] = Module(path)
        return made[cell, dtype]

    return module


@CELLS
@pytest.mark.parametrize("dtype", [f64, f32], ids=str)
def test_the_loops_of_the_host_equal_autograd(cell: str, dtype: torch.dtype, tmp_path: Path) -> None:
    need_host_compiler()
    given = extension(cell, "host")
    module = Module(build(given, local_arch(given), tmp_path))
    for problem in PROBLEMS:
        check(module, STEPS[cell], problem, dtype)


@CELLS
@pytest.mark.parametrize("dtype", [bf16, f16, f32], ids=str)
@pytest.mark.parametrize("late", [False, True], ids=["copies-at-once", "copies-as-late-as-they-may-be"])
def test_the_gpu_source_equals_autograd(
    emulated: Emulated, cell: str, dtype: torch.dtype, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if late:
        monkeypatch.setenv("EMULATED_BACKWARDS", "1")
    for problem in PROBLEMS:
        check(emulated(cell, dtype), STEPS[cell], problem, dtype)


def test_a_step_of_decoding_equals_the_forward_of_one_step(emulated: Emulated) -> None:
    module = emulated("DiagonalLstm", bf16)
    for problem in (Problem(1, 3, 40), Problem(1, 9, 5, masked=True, starts=True, learned=True)):
        given = problem.inputs(module.counts, bf16)
        call, outputs = module.describe(given)
        assert module.call("forward", call) is None
        wanted = {name: outputs[name].clone() for name in ("y", "last")}
        assert module.call("step", call | {"last": given.h0}) is None  # in place
        assert torch.equal(outputs["y"], wanted["y"])
        assert torch.equal(given.h0, wanted["last"])


def test_what_is_missing_is_said(emulated: Emulated) -> None:
    module = emulated("GatedValue", f32)
    given = Problem(2, 1, 4, starts=True, learned=True).inputs(module.counts, f32)
    for name, direction, said in (
        ("h0", "forward", "h0 is missing"),
        ("g_last", "backward", "g_last is missing"),
        ("checkpoints", "backward", "the checkpoints are missing"),
        ("dvector", "backward", "the place of the vectors' gradient is missing"),
        ("dinitial", "backward", "the place of the initial state's gradient is missing"),
    ):
        call, _ = module.describe(given)
        assert module.call(direction, call | {name: None}) == said
    call, _ = module.describe(given)
    assert module.call("step", call) == "a step is one time step"
    for name, wrong, said in (
        ("h0", given.h0[:, :, :2], "h0 must be (1, 1, 4), not (1, 1, 2)"),
        ("stream", given.streams[0], "stream must be a list of tensors"),
        ("vector", [given.vectors[0].half()], "vector[0] has the wrong dtype, torch.float16"),
    ):
        assert module.call("forward", call | {name: wrong}) == said


def test_it_compiles_for_a_gpu(tmp_path: Path) -> None:
    need_nvcc()
    assert build(extension("GatedValue", "cuda", bf16), "sm_80", tmp_path).is_file()


@pytest.mark.gpu
@CELLS
@pytest.mark.parametrize("dtype", [bf16, f16, f32], ids=str)
def test_a_gpu_equals_autograd_and_gives_the_same_bits_twice(cell: str, dtype: torch.dtype, tmp_path: Path) -> None:
    need_gpu()
    given = extension(cell, "cuda", dtype)
    module = Module(build(given, local_arch(given), tmp_path))
    for problem in ON_A_GPU:
        check(module, STEPS[cell], problem, dtype, "cuda")
        inputs = problem.inputs(module.counts, dtype, "cuda")
        first, second = module.run(inputs), module.run(inputs)
        assert all(torch.equal(x, second[name]) for name, x in first.items())
