"""Run the kernels of decoding in their compiled modules (`elman/decode_call.h` of `elman_csrc`): one for each
dtype, and one for each dtype and cell with a step."""

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
from elman_core.kernels.family import Family, Values
from elman_core.kernels.runtime import transformed
from elman_core.kernels.spec import Cell

from .spec import DTYPES, NARROW, STEP, SharedCell

_met = WeakTensorKeyDictionary()


def extension(dtype: torch.dtype, cell: Cell | None = None) -> Extension:
    """What is compiled for a storage dtype: the step of a cell, or, without one, the kernels that all models share."""
    name = f"{'shared' if cell is None else cell.name + '_step'}_decode_{str(dtype).removeprefix('torch.')}"
    macros: dict[str, Any] = {} if cell is None else {"CELL": cell.type}
    header = None if cell is None else cell.header
    return build.shipped(name, "decode_cuda.cu", header, **macros, DTYPE=dtype)


def extensions(dtypes: Sequence[torch.dtype], cell: Cell | None = None) -> list[Extension]:
    """One for each of these dtypes that has a kernel; for bfloat16 without any."""
    known = DTYPES if cell is None else NARROW
    return [extension(dtype, cell) for dtype in dict.fromkeys(dtypes or NARROW[:1]) if dtype in known]


def alone(x: Tensor) -> bool:
    """True when neither autograd, in any of its modes, nor autocast is active."""
    if not launches(x) or x.dtype not in DTYPES:
        return False
    return not (torch.is_grad_enabled() or torch.is_autocast_enabled("cuda") or transformed())


@cache
def module(cell: Cell | None, family: Family, dtype: torch.dtype, _index: int | None) -> Any:
    """The module for the current device, whose index is a key of the cache: a host may have GPUs of several architectures."""
    return launch.opened(extension(dtype, cell), family, _index is None)


def here() -> int | None:
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


def run(cell: Cell, _function: str, given: Values, values: Values) -> None:
    """As `Operator` calls it. Raises `KernelError`: too many rows, another dtype or shape than it takes, or a failed launch."""
    if isinstance(cell, SharedCell):
        family, own = cell.family, None
    else:
        family, own = STEP, cell
        w, v = values["w"], values["weight"]
        if v is None:
            given["u"] = given.pop("x")
        elif v.data_ptr() == w.data_ptr() and (v.shape, v.stride()) == (w.shape, w.stride()):
            given["weight"] = given["w"]  # which is then read once
    given |= {word: values[word] for word in ("activated", "eps") if word in values}
    like = values["logits" if "logits" in values else "x"]
    read_first = [*given.get("map", ()), *(given[name] for name in ("weight", "w") if name in given)]
    early = _rest(read_first) and _may_begin_early(like.device)
    with launch.on(like):
        made = module(own, family, like.dtype, like.device.index)
        made.run("", early=early, stream=launch.stream(like), **given)
