"""The C interface of the compiled dense modules (`elman/dense_call.h` of `elman_csrc`), for the host and the GPU alike."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elman_core.kernels import build
from elman_core.kernels.build import Extension, Target
from elman_core.kernels.cell import Cell
from elman_core.kernels.runtime import open_module
from elman_core.registry.errors import ConfigError, KernelError

_MOST_EXTRAS = 4
_ALIGNMENT = 16  # bytes: the widest load of a kernel
_FUNCTIONS = ("forward", "backward", "forward_float32", "forward_float64", "backward_float32", "backward_float64")
_error_words: dict[int, Tensor] = {}


class View(ctypes.Structure):
    """DenseView: address, strides over t and b in elements."""

    _fields_ = (("address", ctypes.c_uint64), ("t", ctypes.c_int64), ("b", ctypes.c_int64))


class Call(ctypes.Structure):
    """DenseCall."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("steps", "batch", "width", "extras")),
        ("main", View),
        ("extra", View * _MOST_EXTRAS),
        *((name, ctypes.c_uint64) for name in ("w", "h0", "history", "y", "last", "g_last", "da")),
        ("dextra", ctypes.c_uint64 * _MOST_EXTRAS),
        *((name, ctypes.c_uint64) for name in ("dh0", "mask", "a")),
        ("x", View),
        *((name, ctypes.c_uint64) for name in ("bias", "sums", "dx", "dbias", "error", "stream")),
        *((name, ctypes.c_int64) for name in ("rows", "groups", "delay", "timeout_ns")),
    )


def make_call(
    main: Tensor, extras: Sequence[Tensor], w: Tensor, history: Tensor, a: Tensor, mask: Tensor | None
) -> Call:
    """What both directions are given, on the host and on a GPU: `main` is u or the gradient of y. a may be empty."""
    if len(extras) > _MOST_EXTRAS:
        raise KernelError(f"compiled dense cells read up to {_MOST_EXTRAS} tensors beside u, not {len(extras)}")
    call = Call(*main.shape, len(extras), view(main))
    for i, e in enumerate(extras):
        call.extra[i] = view(e)
    call.w, call.history, call.mask = w.data_ptr(), history.data_ptr(), address(mask)
    call.a = address(a if a.numel() else None)
    return call


def extension(cell: Cell, target: Target) -> Extension:
    """What is compiled of a cell, for the usual size on a GPU.

    Raises:
        KernelError: the sources are not installed.
    """
    input_ = {} if cell.input == "Projected" else {"INPUT": cell.input}
    binding = "dense_host.cpp" if target == "host" else "dense_cuda.cu"
    return build.shipped(f"{cell.name}_dense_{target}", binding, cell.header, CELL=cell.type, **input_)


def room_for_a(cell: Cell, like_TBd: Tensor) -> Tensor:
    """Room for what a compiled cell keeps for its backward: a (T, B, d), or nothing."""
    return like_TBd.new_empty(like_TBd.shape if cell.uses_a else 0)


@cache
def open_library(path: Path, cell: Cell) -> Any:
    """The compiled module, its functions typed.

    Raises:
        ConfigError: the cell header and the kernel made of it differ in what the backward is given.
        KernelError: as `runtime.open_module`.
    """
    library = open_module(path, "dense", Call)
    if bool(library.elman_dense_uses_a()) != cell.uses_a:
        said = f"its cell says uses_a = {str(not cell.uses_a).lower()} and its DenseKernel uses_a={cell.uses_a}"
        raise ConfigError(f"{cell.name}: {said}: they must agree")
    for name in _FUNCTIONS:
        if (function := getattr(library, f"elman_dense_{name}", None)) is not None:
            function.restype = ctypes.c_char_p
    for name in ("forward_step", "backward_step"):
        if (function := getattr(library, f"elman_dense_{name}", None)) is not None:
            function.restype = ctypes.c_char_p
            function.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64)
    return library


def check_errors(device: torch.device) -> None:
    """Raise if a launch on this device gave up waiting. Sees what has happened so far: synchronise first to be sure.

    Raises:
        KernelError: one did; its outputs are worthless.
    """
    word = _error_words.get(device.index or 0)
    if word is not None and int(word[0]) != 0:
        word[0] = 0
        raise KernelError(
            "a dense kernel gave up waiting for its other blocks, and its results are worthless: another program keeps the GPU "
            "from running them together. Free the GPU, or set ELMAN_KERNELS=off"
        )


def error_word(device: torch.device) -> int:
    """Address of the pinned word that a launch on this device sets when it gives up waiting; raises for an earlier launch.

    Raises:
        KernelError: as `check_errors`.
    """
    check_errors(device)
    index = device.index or 0
    if index not in _error_words:
        _error_words[index] = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    return _error_words[index].data_ptr()


def rows(x_TBd: Tensor) -> Tensor:
    """x itself where a kernel can read it as it lies, else a contiguous copy."""
    size = x_TBd.element_size()
    aligned = x_TBd.data_ptr() % _ALIGNMENT == 0
    if aligned and x_TBd.is_contiguous():
        return x_TBd
    if aligned and x_TBd.stride(2) == 1 and all(v * size % _ALIGNMENT == 0 for v in x_TBd.stride()[:2]):
        return x_TBd
    return x_TBd.clone(memory_format=torch.contiguous_format)


def view(x_TBd: Tensor) -> View:
    return View(x_TBd.data_ptr(), x_TBd.stride(0), x_TBd.stride(1))


def address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
