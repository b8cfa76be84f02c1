"""The dense op through the host build of its cell: an instrument of the tests, in float32 and float64."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from elman_core.kernels import build
from elman_core.kernels.cell import Cell
from elman_core.registry.errors import KernelError

from .native import Call, extension, make_call, open_library, room_for_a, rows


def forward(
    cell: Cell, u_TBd: Tensor, extras: Sequence[Tensor], w_dd: Tensor, h0_Bd: Tensor, mask_TB: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y (T, B, d), h_T (B, d), history (T+1, B, d), a (T, B, d) or empty), all in the dtype of u.

    Raises:
        KernelError: it cannot be built, or the dtype is not supported.
    """
    function = _function(cell, "forward", u_TBd.dtype)
    u_TBd, *extras = (rows(x) for x in (u_TBd, *extras))
    w_dd, h0_Bd, mask_TB = w_dd.contiguous(), h0_Bd.contiguous(), None if mask_TB is None else mask_TB.contiguous()
    history, a = u_TBd.new_empty(u_TBd.shape[0] + 1, *u_TBd.shape[1:]), room_for_a(cell, u_TBd)
    y_TBd, last_Bd = u_TBd.new_empty(u_TBd.shape), torch.empty_like(h0_Bd)
    call = make_call(u_TBd, extras, w_dd, history, a, mask_TB)
    call.h0, call.y, call.last = h0_Bd.data_ptr(), y_TBd.data_ptr(), last_Bd.data_ptr()
    _run(cell, function, call)
    return y_TBd, last_Bd, history, a


def backward(
    cell: Cell,
    gy_TBd: Tensor,
    g_last_Bd: Tensor,
    extras: Sequence[Tensor],
    w_dd: Tensor,
    history: Tensor,
    a: Tensor,
    mask_TB: Tensor | None,
) -> tuple[Tensor, list[Tensor], Tensor]:
    """(da (T, B, d), the gradients of the extras, dh_0 (B, d)).

    Raises:
        KernelError: as `forward`.
    """
    function = _function(cell, "backward", history.dtype)
    gy_TBd, *extras = (rows(x) for x in (gy_TBd, *extras))
    w_dd, g_last_Bd = w_dd.contiguous(), g_last_Bd.contiguous()
    mask_TB = None if mask_TB is None else mask_TB.contiguous()
    da_TBd, dh0_Bd = history.new_empty(gy_TBd.shape), torch.empty_like(g_last_Bd)
    dextras = [history.new_empty(gy_TBd.shape) for _ in extras]
    call = make_call(gy_TBd, extras, w_dd, history, a, mask_TB)
    call.g_last, call.da, call.dh0 = g_last_Bd.data_ptr(), da_TBd.data_ptr(), dh0_Bd.data_ptr()
    for i, e in enumerate(dextras):
        call.dextra[i] = e.data_ptr()
    _run(cell, function, call)
    return da_TBd, dextras, dh0_Bd


def _function(cell: Cell, direction: str, dtype: torch.dtype) -> Any:
    if dtype not in (torch.float32, torch.float64):
        raise KernelError(f"the host build of {cell.name} runs in float32 and float64, not {dtype}")
    bare = extension(cell, "host")
    library = open_library(build.build(bare, build.local_arch(bare)), cell)
    return getattr(library, f"elman_dense_{direction}_{str(dtype).removeprefix('torch.')}")


def _run(cell: Cell, function: Any, call: Call) -> None:
    if (said := function(ctypes.byref(call))) is not None:
        raise KernelError(f"the host build of {cell.name}: {said.decode()}")
