"""The compiled modules of few rows: built or found once, verified before anything is believed, and launched."""

from __future__ import annotations

import ctypes
import importlib.util
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from elman_core.kernels import build
from elman_core.kernels.build import Extension
from elman_core.kernels.first_use import ensure_verified
from elman_core.kernels.runtime import load_or_warn, transformed
from elman_core.registry.errors import KernelError

from .native import open_library

if TYPE_CHECKING:
    from elman_core.kernels.dense.op import DenseKernel

MOST_ROWS = 64
EARLY = True
"""Whether a kernel may load its weights while the one in front still runs (compute capability 9.0 and newer)."""

DTYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
NARROW = (torch.bfloat16, torch.float16)

Problem = tuple[str | int | tuple[int, ...], ...]
"""What is verified at first use, in plain values: ("linear", most rows, K, (N, …)), ("step", most rows, K, d), ("norm", D) or
("draw", V)."""

kernels: dict[str, DenseKernel] = {}
"""Those that have a step, by their names."""
_there: dict[tuple[Any, ...], bool] = {}
_verified: set[tuple[Any, ...]] = set()
_met = WeakTensorKeyDictionary()


def extension(dtype: torch.dtype, kernel: DenseKernel | None = None) -> Extension:
    """What is compiled for a storage type: the step of a kernel's cell, or everything else.

    Raises:
        KernelError: the sources are not installed.
    """
    if importlib.util.find_spec("elman_csrc") is None:
        raise KernelError("the kernel sources are not installed: type `pip install elman-csrc`")
    import elman_csrc

    cell = () if kernel is None else (("ELMAN_CELL", kernel.cell),)
    return Extension(
        name=f"{'linear' if kernel is None else kernel.name + '_step'}_decode_{str(dtype).removeprefix('torch.')}",
        binding=elman_csrc.get_bindings() / "decode_cuda.cu",
        include=(elman_csrc.get_include(),),
        header=None if kernel is None else kernel.header,
        defines=(*cell, ("ELMAN_DTYPE", str(DTYPES[dtype]))),
        python=False,
    )


def most_rows(rows: int) -> int:
    """The most rows that the kernel for so many takes: four are compiled, each verified with the fewest and the most."""
    return 8 if rows <= 8 else 16 if rows <= 16 else 32 if rows <= 32 else MOST_ROWS


def fewest_rows(most: int) -> int:
    """The fewest rows of the kernel that takes `most`."""
    return 1 if most == 8 else most // 2 + 1


def alone(x: Tensor) -> bool:
    """True when neither autograd, in any of its modes, nor autocast is active."""
    gradients = torch.is_grad_enabled() or transformed()
    return x.is_cuda and x.dtype in DTYPES and not gradients and not torch.is_autocast_enabled("cuda")


@torch.compiler.assume_constant_result
def ready(name: str, index: int | None, dtype: torch.dtype, _mode: str, *problem: str | int | tuple[int, ...]) -> bool:
    """Whether the module of a kernel ("" for what has no cell) is there; its problem is verified at the first use.

    What came of it holds for the process: a compiler that fails is not asked again. `torch.compile` evaluates this while it
    traces, and takes only plain values as arguments, one by one. `problem` is a `Problem`.

    Raises:
        KernelError: the kernel is wrong; or a CUDA graph is being captured before the first use.
    """
    key = (name, index, dtype, _mode)
    if _mode == "off":
        return False
    with torch.cuda.device(-1 if index is None else index):
        if key not in _there:
            found = load_or_warn(f"{name or 'linear maps'} of few rows", lambda: _module(name, dtype, index))
            _there[key] = found is not None
        if _there[key] and (*key, problem) not in _verified:
            from .spec import first_use_cases, spec_of  # which call what this module launches

            ensure_verified(spec_of(name), first_use_cases(dtype, problem), "one launch")
            _verified.add((*key, problem))
    return _there[key]


@cache
def _module(name: str, dtype: torch.dtype, _index: int | None) -> Any:
    """The module for the current device, which is the one of that number: a host may have GPUs of several architectures."""
    what = extension(dtype, kernels[name] if name else None)
    return open_library(build.build(what, build.local_arch(what)))


@cache
def _may_begin_early(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _rest(weights: tuple[Tensor, ...]) -> bool:
    """Whether every weight was there, as it is now, at an earlier launch.

    What the kernel directly in front has only just written must not be read before waiting for it, and a kernel that begins
    early reads its weights first. So whoever meets a weight for the first time begins late: a parameter once, a copy always.
    """
    known = True
    for weight in weights:
        version = -1 if weight.is_inference() else weight._version
        if _met.get(weight) != version:
            _met[weight] = version
            known = False
    return known


def launch(name: str, function: str, call: Any, x: Tensor, *weights: Tensor) -> None:
    """Launch on the current stream of the device of x.

    Args:
        weights: what the kernel reads before it waits for those in front of it.

    Raises:
        KernelError: too many rows, a dtype it does not take, or a launch that failed.
    """
    if function in ("linear", "step") and (len(x) > MOST_ROWS or x.dtype not in NARROW):
        raise KernelError(
            f"{function}: few rows are up to {MOST_ROWS} in bfloat16 or float16, not {len(x)} in {x.dtype}"
        )
    call.early = _rest(weights) and EARLY and _may_begin_early(x.device)
    index = x.device.index if x.is_cuda else None
    with torch.cuda.device(-1 if index is None else index):
        said = getattr(_module(name, x.dtype, index), f"elman_decode_{function}")(ctypes.byref(call))
    if said is not None:
        raise KernelError(f"kernel {f'{name} {function}'.strip()} of few rows: {said.decode()}")


def check(function: str, x: Tensor, *shaped: tuple[Tensor | None, tuple[int, ...]]) -> None:
    """Whether tensors have the dtype and device of x and the shapes beside them: a kernel would read beyond them.

    Raises:
        KernelError: one has not, or the columns of x are not a multiple of 8.
    """
    if x.shape[-1] % 8:
        raise KernelError(f"{function}: x has {x.shape[-1]} columns, which is no multiple of 8")
    for tensor, shape in shaped:
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape or tensor.dtype != x.dtype or tensor.device != x.device:
            raise KernelError(
                f"{function}: beside x {tuple(x.shape)} in {x.dtype} on {x.device} belongs {shape}, "
                f"not {tuple(tensor.shape)} in {tensor.dtype} on {tensor.device}"
            )
