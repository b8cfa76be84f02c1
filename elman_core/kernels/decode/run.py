"""The compiled modules of decoding: built or found once, and launched."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from elman_core.kernels import build
from elman_core.kernels.build import Extension
from elman_core.kernels.cell import Cell
from elman_core.kernels.runtime import DTYPE_CODES, transformed
from elman_core.registry.errors import KernelError

from .native import open_library

MOST_ROWS = 64
EARLY = True
"""Whether a kernel may load its weights while the one in front still runs (compute capability 9.0 and newer)."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NARROW = (torch.bfloat16, torch.float16)

_met = WeakTensorKeyDictionary()


def extension(dtype: torch.dtype, cell: Cell | None = None) -> Extension:
    """What is compiled for a storage type: the step of a cell, or everything else.

    Raises:
        KernelError: the sources are not installed.
    """
    name = f"{'shared' if cell is None else cell.name + '_step'}_decode_{str(dtype).removeprefix('torch.')}"
    macros = {} if cell is None else {"CELL": cell.type}
    header = None if cell is None else cell.header
    return build.shipped(name, "decode_cuda.cu", header, **macros, DTYPE=DTYPE_CODES[dtype])


def most_rows(rows: int) -> int:
    """The most rows that the kernel for so many takes: four are compiled, each verified with the fewest and the most."""
    return 8 if rows <= 8 else 16 if rows <= 16 else 32 if rows <= 32 else MOST_ROWS


def fewest_rows(most: int) -> int:
    """The fewest rows of the kernel that takes `most`."""
    return 1 if most == 8 else most // 2 + 1


def alone(x: Tensor) -> bool:
    """True when neither autograd, in any of its modes, nor autocast is active."""
    if not x.is_cuda or x.dtype not in DTYPES:
        return False
    return not (torch.is_grad_enabled() or torch.is_autocast_enabled("cuda") or transformed())


@cache
def module(cell: Cell | None, dtype: torch.dtype, _index: int | None) -> Any:
    """The module for the current device, which is the one of that number: a host may have GPUs of several architectures.

    Raises:
        KernelError: it cannot be built or loaded.
    """
    what = extension(dtype, cell)
    return open_library(build.build(what, build.local_arch(what)))


def here() -> int | None:
    """The current device; None where there is no GPU."""
    return torch.cuda.current_device() if torch.cuda.is_available() else None


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


def launch(cell: Cell | None, function: str, call: Any, x: Tensor, *weights: Tensor) -> None:
    """Launch on the current stream of the device of x.

    Args:
        cell: whose step it is; None for what has no cell.
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
        said = getattr(module(cell, x.dtype, index), f"elman_decode_{function}")(ctypes.byref(call))
    if said is not None:
        raise KernelError(f"kernel {function} of {'decode' if cell is None else cell.name}: {said.decode()}")


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
