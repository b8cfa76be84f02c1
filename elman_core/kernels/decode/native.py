"""The C interface of the compiled modules of few rows (`elman/decode_call.h` of `elman_csrc`), through ctypes."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elman_core.kernels.runtime import open_module

_ALIGNMENT = 16  # bytes: the widest load of a kernel


class Call(ctypes.Structure):
    """FewRowsCall of decode_call.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "inputs", "outputs", "activated", "extras")),
        *((name, ctypes.c_uint64) for name in ("x", "weight", "bias", "out")),
        ("x_step", ctypes.c_int64),
        *((name, ctypes.c_uint64) for name in ("w", "h", "last")),
        ("extra", ctypes.c_uint64 * 4),
        ("extra_step", ctypes.c_int64 * 4),
        ("extra_out", ctypes.c_uint64 * 4),
        ("value", ctypes.c_double * 3),
        ("early", ctypes.c_int64),
        ("stream", ctypes.c_uint64),
    )


@cache
def open_library(path: Path) -> Any:
    """The compiled module, its functions typed.

    Raises:
        KernelError: as `native.open_module`.
    """
    library = open_module(path, "decode", Call)
    for name in ("linear", "step", "norm", "draw"):
        if (function := getattr(library, f"elman_decode_{name}", None)) is not None:
            function.restype = ctypes.c_char_p
    return library


def make_call(x_BK: Tensor, outputs: int, weight: Tensor | None, bias: Tensor | None, out: Tensor) -> Call:
    """What every function is given; x as `rows` leaves it."""
    call = Call(x_BK.shape[0], x_BK.shape[1], outputs)
    call.x, call.out, call.x_step = x_BK.data_ptr(), out.data_ptr(), x_BK.stride(0)
    call.weight, call.bias = (0 if t is None else t.data_ptr() for t in (weight, bias))
    if x_BK.is_cuda:
        call.stream = torch.cuda.current_stream(x_BK.device).cuda_stream
    return call


def whole(weight: Tensor) -> Tensor:
    """The weight itself where a kernel can read it, else a copy."""
    if weight.is_contiguous() and weight.data_ptr() % _ALIGNMENT == 0:
        return weight
    return weight.clone(memory_format=torch.contiguous_format)


def rows(x_BK: Tensor) -> Tensor:
    """x itself where a kernel can read its rows as they lie, else a contiguous copy."""
    even = x_BK.stride(1) == 1 and x_BK.stride(0) * x_BK.element_size() % _ALIGNMENT == 0
    return x_BK if even and x_BK.data_ptr() % _ALIGNMENT == 0 else x_BK.clone(memory_format=torch.contiguous_format)
