"""The C interface of the compiled matrix-state modules (`bind/matrix_state_call.h` of `elman_csrc`), through ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elman_core.kernels.runtime import open_module


class View(ctypes.Structure):
    """MatrixView: where a tensor begins, and elements from one of its time steps to the next."""

    _fields_ = (("address", ctypes.c_uint64), ("step", ctypes.c_int64))


def _addresses(*names: str) -> tuple[tuple[str, Any], ...]:
    return tuple((name, ctypes.c_uint64) for name in names)


class Call(ctypes.Structure):
    """MatrixCall of matrix_state_call.h."""

    _fields_ = (
        *((n, ctypes.c_int64) for n in ("batch", "steps", "heads", "lines", "scalars", "params", "k_head", "q_head")),
        *(("k", View), ("q", View), ("line", View * 4), ("scalar", View * 2), ("param", ctypes.c_uint64 * 4)),
        *_addresses("a_log", "dt_bias", "mask"),
        *(("state_line", ctypes.c_int64), ("state_row", ctypes.c_int64)),
        *_addresses("s0", "s1", "o", "saved", "dy", "ds1", "ds0"),
        *(("dk", View), ("dq", View), ("dline", View * 4), ("dscalar", View * 2), ("dparam", ctypes.c_uint64 * 4)),
        *_addresses("dhead", "da_log", "ddt_bias", "parts", "stream"),
    )


@cache
def open_library(path: Path) -> Any:
    """The compiled module, its functions typed.

    Raises:
        KernelError: as `native.open_module`.
    """
    library = open_module(path, "matrix", Call)
    library.elman_matrix_forward.restype = library.elman_matrix_backward.restype = ctypes.c_char_p
    library.elman_matrix_info.restype = None
    return library


_infos: dict[int, tuple[int, ...]] = {}


def info(library: Any) -> tuple[int, ...]:
    """(parts of a head, shared memory of a forward and of a backward block, alignment of rows)."""
    if id(library) not in _infos:
        out = (ctypes.c_int64 * 4)()
        library.elman_matrix_info(out)
        _infos[id(library)] = tuple(out)
    return _infos[id(library)]


def view(x: Tensor) -> View:
    return View(x.data_ptr(), x.stride(1))


def aligned(x: Tensor, align: int) -> Tensor:
    """x itself where a kernel can read it in place (time steps evenly apart, the rest adjacent, rows aligned), else a copy.

    `align` 0 asks for no alignment beyond the elements'. The host takes contiguous tensors only.
    """
    size = x.element_size()
    if x.shape[1] == 1:  # of a single step any stride is true: the one that makes rows lie evenly
        x = x.as_strided(x.shape, (x.stride(0), x.stride(0), *x.stride()[2:]))
    adjacent = all(x.stride(i) == x.shape[i + 1 :].numel() for i in range(2, x.dim()) if x.shape[i] > 1)
    even = x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)
    far = x.shape[1] == 1 or x.stride(1) >= x.shape[2:].numel()
    apart = align == 0 or (x.data_ptr() % align == 0 and x.stride(1) * size % align == 0)
    if adjacent and even and far and apart and (x.is_cuda or x.is_contiguous()):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def sliceable(widths: Sequence[int], size: int, align: int) -> bool:
    """Whether slices of these widths, the last for scalars, of one tensor's rows all start aligned."""
    starts = [*accumulate(widths[:-1]), sum(widths)]
    return all(start * size % align == 0 for start in (starts[:-2] + starts[-1:]))


def part(x: Tensor | None, rows: slice) -> Tensor | None:
    return None if x is None else x[rows]


def address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def on(x: Tensor) -> torch.cuda.device:
    return torch.cuda.device(x.device.index if x.is_cuda else -1)
