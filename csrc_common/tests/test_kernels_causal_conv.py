"""The causal convolution: its GPU source on emulated threads, and on a GPU, against the sum written out in float64."""

from __future__ import annotations

from pathlib import Path

import elman_csrc
import pytest
import torch
from causal_conv_helpers import Module, Problem, reference
from elementwise_helpers import too_far
from emulated import LIBRARY, compile_emulated

from elman_core.kernels.build import Extension, build, local_arch
from elman_core.nn import CausalConv
from elman_core.testing.kernel import need_gpu, need_host_compiler, need_nvcc

f64, f32, bf16, f16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
CODES = {f32: "1", bf16: "2", f16: "3"}


def problems(taps: int) -> list[Problem]:
    return [
        Problem(1, 2, 3, taps),
        Problem(37, 3, 5, taps, silu=False),
        Problem(131, 3, 16, taps, sliced=True),
        Problem(37, 2, 40, taps, masked=True, carried=False),
        Problem(100, 2, 72, taps, starts=True),
        Problem(130, 9, 24, taps, masked=True, starts=True, sliced=True),
        Problem(33, 3, 264, taps, masked=True, starts=True),
        Problem(18, 5, 8, taps),  # the last chunk is shorter than the window
    ]


def extension(taps: int, dtype: torch.dtype) -> Extension:
    return Extension(
        f"causal_conv_{taps}",
        elman_csrc.get_bindings() / "causal_conv_cuda.cu",
        include=(elman_csrc.get_include(),),
        defines=(("ELMAN_TAPS", str(taps)), ("ELMAN_DTYPE", CODES[dtype])),
        python=False,
    )


def check(module: Module, problem: Problem, dtype: torch.dtype, device: str = "cpu") -> None:
    given = problem.inputs(dtype)
    single, exact = (reference(given, problem.silu, wide) for wide in (f32, f64))
    found = module.run(problem.inputs(dtype, device), problem.silu)
    assert not too_far({name: x.cpu() for name, x in found.items()}, single, exact)


@pytest.mark.parametrize("late", [False, True], ids=["copies-at-once", "copies-as-late-as-they-may-be"])
@pytest.mark.parametrize(("taps", "dtype"), [(4, bf16), (4, f32), (2, f16), (7, bf16), (12, f32)], ids=str)
def test_the_gpu_source_equals_the_sum(
    taps: int, dtype: torch.dtype, late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_host_compiler()
    if late:
        monkeypatch.setenv("EMULATED_BACKWARDS", "1")
    given, path = extension(taps, dtype), tmp_path / "conv.so"
    compile_emulated(given, given.binding, path, *LIBRARY)
    for problem in problems(taps):
        check(Module(path), problem, dtype)


def test_a_step_of_decoding_may_write_its_window_in_place_and_says_what_is_missing(tmp_path: Path) -> None:
    need_host_compiler()
    given, path, problem = extension(4, bf16), tmp_path / "conv.so", Problem(1, 3, 40)
    compile_emulated(given, given.binding, path, *LIBRARY)
    module, inputs = Module(path), problem.inputs(bf16)
    call, _ = module.describe(inputs, problem.silu)
    wanted = reference(problem.inputs(bf16), problem.silu)["last"]
    assert module.call("forward", call | {"last": inputs["window"]}) is None
    torch.testing.assert_close(inputs["window"], wanted.float())
    for direction, changed, said in (
        ("forward", {"weight": None}, "x or the weights are missing"),
        ("backward", {"shares": None}, "dy, dx or shares are missing"),
        ("forward", {"weight": inputs["weight"][:3]}, "weight must be (40, K), not (3, 4)"),
        ("forward", {"bias": inputs["bias"].bfloat16()}, "bias has the wrong dtype, torch.bfloat16"),
    ):
        assert module.call(direction, call | changed) == said


@pytest.mark.parametrize("masked", [False, True])
def test_the_sum_is_that_of_the_layer(masked: bool) -> None:
    given = Problem(23, 3, 6, masked=masked).inputs(f64)
    layer = CausalConv(6).double()
    with torch.no_grad():
        layer.weight.copy_(given["weight"][:, None])
        assert layer.bias is not None
        layer.bias.copy_(given["bias"])
        mask = None if given["mask"] is None else given["mask"].bool()
        y, window = layer(given["x"], given["window"], mask)
    expected = reference(given, silu=False)
    there = torch.ones(23, 3, dtype=torch.bool) if mask is None else mask
    torch.testing.assert_close(y[there], expected["y"][there])
    torch.testing.assert_close(window, expected["last"])


def test_it_compiles_for_a_gpu(tmp_path: Path) -> None:
    need_nvcc()
    assert build(extension(4, bf16), "sm_80", tmp_path).is_file()


@pytest.mark.gpu
@pytest.mark.parametrize(("taps", "dtype"), [(4, bf16), (4, f16), (4, f32), (2, bf16), (8, bf16), (12, f32)], ids=str)
def test_a_gpu_equals_the_sum_and_gives_the_same_bits_twice(taps: int, dtype: torch.dtype, tmp_path: Path) -> None:
    need_gpu()
    given = extension(taps, dtype)
    module = Module(build(given, local_arch(given), tmp_path))
    for problem in [*problems(taps), Problem(300, 5, 520, taps, masked=True, starts=True)]:
        check(module, problem, dtype, "cuda")
        inputs = problem.inputs(dtype, "cuda")
        first, second = module.run(inputs, problem.silu), module.run(inputs, problem.silu)
        assert all(torch.equal(x, second[name]) for name, x in first.items())
