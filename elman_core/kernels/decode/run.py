"""The compiled modules of decoding: built or found once, and launched."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from elman_core.kernels import build, launch
from elman_core.kernels.build import Extension
from elman_core.kernels.cell import Cell
from elman_core.kernels.runtime import DTYPE_CODES, transformed

MOST_ROWS = 64
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NARROW = (torch.bfloat16, torch.float16)

_met = WeakTensorKeyDictionary()


def extension(dtype: torch.dtype, cell: Cell | None = None) -> Extension:
    """What is compiled for a storage type: the step of a cell, or everything else.

    Raises:
        KernelError: the sources are not installed.
    """
    name = f"{'shared' if cell is None else cell.name + '_step'}_decode_{str(dtype).removeprefix('torch.')}"
    macros: dict[str, Any] = {} if cell is None else {"CELL": cell.type}
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
def module(cell: Cell | None, family: str, dtype: torch.dtype, _index: int | None) -> Any:
    """The module for the current device, which is the one of that number: a host may have GPUs of several architectures.

    Raises:
        KernelError: it cannot be built or loaded.
    """
    return launch.opened(extension(dtype, cell), f"decode_{family}")


def here() -> int | None:
    """The current device; None where there is no GPU."""
    return torch.cuda.current_device() if torch.cuda.is_available() else None


@cache
def _may_begin_early(device: torch.device) -> bool:
    """Whether a kernel may load its weights while the one in front still runs."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _rest(weights: Sequence[Tensor]) -> bool:
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


def run(cell: Cell | None, family: str, like: Tensor, weights: Sequence[Tensor], /, **given: Any) -> None:
    """Launch on the current stream of the device of `like`, the input.

    Args:
        cell: whose step it is; None for what has no cell. family: of the tables in launch.cpp, without its `decode_`.
        weights: what the kernel reads before it waits for those in front of it. given: the arguments of that family.

    Raises:
        KernelError: tensors that do not fit together, too many rows, a dtype it does not take, or a launch that failed.
    """
    early = _rest(weights) and _may_begin_early(like.device)
    with launch.on(like):
        opened = module(cell, family, like.dtype, like.device.index)
        opened.call(**given, early=early, stream=launch.stream(like)).run("")
