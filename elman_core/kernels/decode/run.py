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
from elman_core.kernels.dispatch import launches
from elman_core.kernels.family import Family, Row
from elman_core.kernels.runtime import transformed
from elman_core.kernels.spec import Cell

_BKN = {"B": "rows", "K": "inputs", "N": "outputs"}
FAMILIES = {
    "linear": Family(
        "decode_linear",
        sizes=_BKN,
        functions={"": "x weight out"},
        members=(
            Row("x", "BK", strides="B"), Row("weight", "NK"), Row("bias", "N"), Row("out", "BN"),
            Row("map", "?K", names="maps"), Row("map_out", "B?", names="maps"),
        ),
        numbers="activated early stream",
    ),
    "step": Family(
        "decode_step",
        sizes=_BKN,
        functions={"": "w h out last"},
        members=(
            Row("x", "BK", strides="B"), Row("u", "BN", strides="B"), Row("weight", "NK"), Row("bias", "N"), Row("w", "NN"),
            Row("h", "BN", "compute"), Row("extra", "BN", names="extras", strides="B"), Row("out", "BN"),
            Row("last", "BN", "compute"),
        ),
        numbers="early stream",
    ),
    "norm": Family(
        "decode_norm",
        sizes={"B": "rows", "D": "width"},
        functions={"": "x weight out stream_out"},
        members=(
            Row("x", "BD", strides="B"), Row("weight", "D"), Row("residual", "BD", "compute"), Row("out", "BD"),
            Row("stream_out", "BD", "compute"),
        ),
        numbers="early stream",
        reals="eps",
    ),
    "draw": Family(
        "decode_draw",
        sizes={"B": "rows", "V": "classes"},
        functions={"": "logits drawn shown"},
        members=(
            Row("logits", "BV", strides="B"), Row("waits", "BV", "compute"), Row("seen", "BV", "bool"),
            Row("drawn", "B", "index"), Row("shown", "B", "index"),
        ),
        numbers="top_k early stream",
        reals="penalty temperature below",
    ),
}  # fmt: skip
MOST_ROWS = 64
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NARROW = (torch.bfloat16, torch.float16)

_met = WeakTensorKeyDictionary()


def extension(dtype: torch.dtype, cell: Cell | None = None) -> Extension:
    """What is compiled for a storage dtype: the step of a cell, or, without a cell, the shared kernels."""
    name = f"{'shared' if cell is None else cell.name + '_step'}_decode_{str(dtype).removeprefix('torch.')}"
    macros: dict[str, Any] = {} if cell is None else {"CELL": cell.type}
    header = None if cell is None else cell.header
    return build.shipped(name, "decode_cuda.cu", header, **macros, DTYPE=dtype)


def most_rows(rows: int) -> int:
    """The most rows of the kernel that takes `rows`. Four kernels are compiled, each verified with its fewest and most rows."""
    return 8 if rows <= 8 else 16 if rows <= 16 else 32 if rows <= 32 else MOST_ROWS


def fewest_rows(most: int) -> int:
    """The fewest rows of the kernel that takes `most`."""
    return 1 if most == 8 else most // 2 + 1


def alone(x: Tensor) -> bool:
    """True when neither autograd, in any of its modes, nor autocast is active."""
    if not launches(x) or x.dtype not in DTYPES:
        return False
    return not (torch.is_grad_enabled() or torch.is_autocast_enabled("cuda") or transformed())


@cache
def module(cell: Cell | None, family: str, dtype: torch.dtype, _index: int | None) -> Any:
    """The module for the current device, whose index is a key of the cache: a host may have GPUs of several architectures."""
    return launch.opened(extension(dtype, cell), FAMILIES[family], _index is None)


def here() -> int | None:
    """The index of the current device; None without a GPU."""
    return torch.cuda.current_device() if torch.cuda.is_available() else None


@cache
def _may_begin_early(device: torch.device) -> bool:
    """Whether a kernel may load its weights while the previous kernel still runs."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _rest(weights: Sequence[Tensor]) -> bool:
    """Whether an earlier launch had every weight, in its present version.

    A kernel that starts early reads its weights before it waits for the previous kernel, which may just have written them. So
    the first launch with a weight starts late: once for a parameter, always for a copy.
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
        cell: of a step; None for the shared kernels. family: of `FAMILIES`.
        weights: the tensors that the kernel reads before it waits for the previous one. given: the arguments of the family.

    Raises:
        KernelError: tensors do not fit together, there are too many rows, the dtype is not supported, or the launch failed.
    """
    early = _rest(weights) and _may_begin_early(like.device)
    with launch.on(like):
        opened = module(cell, family, like.dtype, like.device.index)
        opened.call(**given, early=early, stream=launch.stream(like)).run("")
