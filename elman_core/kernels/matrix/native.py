"""The C interface of the compiled matrix-state modules (`bind/matrix_state_call.h` of `elman_csrc`), through ctypes."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elman_core.kernels.runtime import open_module


class Call(ctypes.Structure):
    """MatrixCall of matrix_state_call.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "steps", "heads")),
        ("k", ctypes.c_uint64),
        ("q", ctypes.c_uint64),
        ("line", ctypes.c_uint64 * 4),
        ("scalar", ctypes.c_uint64 * 2),
        ("k_step", ctypes.c_int64),
        ("q_step", ctypes.c_int64),
        ("line_step", ctypes.c_int64 * 4),
        ("scalar_step", ctypes.c_int64 * 2),
        *((name, ctypes.c_uint64) for name in ("a_log", "dt_bias", "mask")),
        ("state_line", ctypes.c_int64),
        ("state_row", ctypes.c_int64),
        *((name, ctypes.c_uint64) for name in ("s0", "s1", "o", "saved", "dy", "ds1", "ds0", "dk", "dq")),
        ("dline", ctypes.c_uint64 * 4),
        ("dscalar", ctypes.c_uint64 * 2),
        ("dk_step", ctypes.c_int64),
        ("dq_step", ctypes.c_int64),
        ("dline_step", ctypes.c_int64 * 4),
        ("dscalar_step", ctypes.c_int64 * 2),
        *((name, ctypes.c_uint64) for name in ("dhead", "da_log", "ddt_bias", "parts", "stream")),
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


def inputs(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, write: Tensor | None, mask: Tensor | None, a_log: Tensor | None,
    dt_bias: Tensor | None,
) -> Call:  # fmt: skip
    call = Call()
    (call.batch, call.steps, call.heads), V = decay.shape, v.shape[3]
    call.q, call.k, call.line[0], call.scalar[0] = (address(x) for x in (q, k, v, decay))
    call.q_step, call.k_step, call.line_step[0], call.scalar_step[0] = (
        q.stride(1),
        k.stride(1),
        v.stride(1),
        decay.stride(1),
    )
    if write is not None:
        call.scalar[1], call.scalar_step[1] = address(write), write.stride(1)
    call.a_log, call.dt_bias, call.mask = address(a_log), address(dt_bias), address(mask)
    call.state_line, call.state_row = 1, V
    if q.is_cuda:
        call.stream = torch.cuda.current_stream(q.device).cuda_stream
    return call


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


def sliceable(columns: int, keys: int, size: int, align: int) -> bool:
    """Whether the slices q, k, v of a (B, T, columns) tensor have rows that start aligned."""
    return columns * size % align == 0 and keys * size % align == 0


def part(x: Tensor | None, rows: slice) -> Tensor | None:
    return None if x is None else x[rows]


def address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def on(x: Tensor) -> torch.cuda.device:
    return torch.cuda.device(x.device.index if x.is_cuda else -1)
