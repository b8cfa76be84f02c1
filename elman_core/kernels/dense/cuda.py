"""The dense op on a GPU: takes a launch plan (dense/plan.py), compiles what that plan needs at its first use, and runs it.

One compiled module is one (cell, dtype, width, kind of plan): seconds of compilation for the shapes that a model has, not
minutes for all that there could be.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from elman_core.kernels import build
from elman_core.kernels.build import Extension
from elman_core.kernels.cell import Cell
from elman_core.kernels.runtime import DTYPE_CODES
from elman_core.registry.errors import KernelError

from . import native
from .native import Call, address, error_word, make_call, open_library, room_for_a, rows, view
from .plan import Device, Kind, Plan, plan

_WARPS = 8  # of a block: kWarps of dense_product.cuh
TIMEOUT_NS = 2_000_000_000  # of one wait for other blocks


def forward(
    cell: Cell,
    u_TBd: Tensor,
    extras: Sequence[Tensor],
    w_dd: Tensor,
    h0_Bd: Tensor,
    mask_TB: Tensor | None,
    bias_d: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y (T, B, d), h_T (B, d) in float32, history and what W multiplied (T+1, B, d), a (T, B, d) or empty; in the dtype of u.

    Args:
        bias_d: with tied weights, where u is x; else W multiplies the history itself.

    Raises:
        KernelError: the size or dtype is not supported, or an earlier launch gave up waiting.
    """
    sizes = tuple(u_TBd.shape)
    chosen = plan_for(cell, sizes, u_TBd.dtype, u_TBd.device)
    u_TBd, *extras = (rows(x) for x in (u_TBd, *extras))
    w_dd, h0_Bd, mask_TB = w_dd.contiguous(), h0_Bd.contiguous(), None if mask_TB is None else mask_TB.contiguous()
    history, y_TBd = u_TBd.new_empty(sizes[0] + 1, *sizes[1:]), u_TBd.new_empty(sizes)
    multiplied, a = history if bias_d is None else torch.empty_like(history), room_for_a(cell, u_TBd)
    bias_d = None if bias_d is None else bias_d.float().contiguous()
    call = _call(chosen, u_TBd, extras, w_dd, history, a, mask_TB)
    call.y, call.bias, call.sums = y_TBd.data_ptr(), address(bias_d), multiplied.data_ptr()
    with torch.cuda.device(u_TBd.device):
        library = _library(cell, chosen, u_TBd.dtype, sizes[2])
        if chosen.kind != "steps":
            last_Bd = torch.empty_like(h0_Bd)
            call.h0, call.last = h0_Bd.data_ptr(), last_Bd.data_ptr()
            _check(cell, chosen, library.elman_dense_forward(ctypes.byref(call)))
            return y_TBd, last_Bd, history, multiplied, a
        _steps_are_untied(cell, bias_d)
        history[0] = h0_Bd
        state_Bd, product_Bd, w_t = h0_Bd.clone(), torch.empty_like(h0_Bd), w_dd.t()
        for t in range(sizes[0]):
            _multiply(history[t], w_t, product_Bd)
            _check(
                cell,
                chosen,
                library.elman_dense_forward_step(ctypes.byref(call), t, product_Bd.data_ptr(), state_Bd.data_ptr()),
            )
    return y_TBd, state_Bd, history, history, a


def backward(
    cell: Cell,
    gy_TBd: Tensor,
    g_last_Bd: Tensor,
    extras: Sequence[Tensor],
    w_dd: Tensor,
    history: Tensor,
    a: Tensor,
    mask_TB: Tensor | None,
    x_TBd: Tensor | None = None,
) -> tuple[Tensor, list[Tensor], Tensor, Tensor | None, Tensor | None]:
    """(da (T, B, d) in the dtype of the history, the gradients of the extras, dh_0 (B, d) in float32, dx like da, db (d,)).

    Args:
        x_TBd: with tied weights, what the forward was given; else there is no dx and no db.

    Raises:
        KernelError: as `forward`.
    """
    sizes = tuple(gy_TBd.shape)
    chosen = plan_for(cell, sizes, history.dtype, history.device)
    gy_TBd, *extras = (rows(x) for x in (gy_TBd, *extras))
    w_dd, g_last_Bd = w_dd.contiguous(), g_last_Bd.contiguous()
    mask_TB = None if mask_TB is None else mask_TB.contiguous()
    da_TBd, dextras = history.new_empty(sizes), [history.new_empty(sizes) for _ in extras]
    call = _call(chosen, gy_TBd, extras, w_dd, history, a, mask_TB)
    call.da = da_TBd.data_ptr()
    for i, e in enumerate(dextras):
        call.dextra[i] = e.data_ptr()
    dx_TBd, dbias_Gd = None, None
    if x_TBd is not None:
        x_TBd, dx_TBd = rows(x_TBd), history.new_empty(sizes)
        dbias_Gd = g_last_Bd.new_empty(_WARPS * chosen.groups, sizes[2])
        call.x, call.dx, call.dbias = view(x_TBd), dx_TBd.data_ptr(), dbias_Gd.data_ptr()
    with torch.cuda.device(history.device):
        library = _library(cell, chosen, history.dtype, sizes[2])
        if chosen.kind != "steps":
            dh0_Bd = torch.empty_like(g_last_Bd)
            call.g_last, call.dh0 = g_last_Bd.data_ptr(), dh0_Bd.data_ptr()
            _check(cell, chosen, library.elman_dense_backward(ctypes.byref(call)))
            return da_TBd, dextras, dh0_Bd, dx_TBd, None if dbias_Gd is None else dbias_Gd.sum(0)
        _steps_are_untied(cell, x_TBd)
        carry_Bd, product_Bd = g_last_Bd.clone(), torch.zeros_like(g_last_Bd)
        for t in range(sizes[0] - 1, -1, -1):
            _check(
                cell,
                chosen,
                library.elman_dense_backward_step(ctypes.byref(call), t, product_Bd.data_ptr(), carry_Bd.data_ptr()),
            )
            _multiply(da_TBd[t], w_dd, product_Bd)
    return da_TBd, dextras, product_Bd.add_(carry_Bd), None, None


def prepare(cell: Cell, sizes: Sequence[int], dtype: torch.dtype) -> str:
    """Compile and load what the current device needs for sizes (T, B, d); the plan in words.

    Raises:
        KernelError: not supported, or it cannot be built.
    """
    chosen = plan_for(cell, tuple(sizes), dtype, torch.device("cuda", torch.cuda.current_device()))
    _library(cell, chosen, dtype, sizes[2])
    return str(chosen)


def plan_for(cell: Cell, sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Plan:
    """The plan for sizes (T, B, d) on this GPU; compiles what it needs to ask the driver whether it fits.

    Raises:
        KernelError: not supported (names what is), or it cannot be built.
    """
    index = device.index or 0
    _plan(sizes, dtype, _device(index))
    return _settled(cell, *sizes[1:], dtype, index)


def extension(cell: Cell, chosen: Plan, dtype: torch.dtype, width: int) -> Extension:
    """What is compiled for a plan."""
    bare = native.extension(cell, "cuda")
    defines = [("ELMAN_DTYPE", str(DTYPE_CODES[dtype])), ("ELMAN_WIDTH", str(width))]
    binding = bare.binding
    if chosen.kind == "steps":
        binding = binding.with_name("dense_cuda_steps.cu")
    else:
        defines += [("ELMAN_KIND", chosen.kind), ("ELMAN_SPILL", str(chosen.spill)), ("ELMAN_WIDE", str(chosen.wide))]
    name = f"{bare.name}_{'wide_' if chosen.wide == 2 else ''}{chosen.kind}_{str(dtype).removeprefix('torch.')}_{width}"
    return replace(bare, name=name, binding=binding, defines=(*bare.defines, *defines))


def capacity(cell: Cell, chosen: Plan, dtype: torch.dtype, width: int, tiles: int = 1) -> tuple[int, int]:
    """(groups of `tiles` tiles that the current device holds together, bytes of shared memory of a block)."""
    library = _library(cell, chosen, dtype, width)
    fit = min(library.elman_dense_capacity(tiles, backward) for backward in (0, 1))
    return fit, library.elman_dense_shared_bytes(tiles)


_plan = cache(plan)


@cache
def _settled(cell: Cell, batch: int, width: int, dtype: torch.dtype, index: int) -> Plan:
    """The first plan whose blocks the device holds together: a part of a GPU may hold fewer than it says."""
    without: set[Kind] = set()
    while True:
        chosen = plan((1, batch, width), dtype, _device(index), without)
        if chosen.kind == "steps":
            return chosen
        with torch.cuda.device(index):
            fit, _ = capacity(cell, chosen, dtype, width, chosen.tiles_each(batch))
        if fit >= (1 if chosen.kind == "cluster" else chosen.groups):
            return chosen
        without.add(chosen.kind)


@cache
def _device(index: int) -> Device:
    found: Any = torch.cuda.get_device_properties(index)
    return Device(found.multi_processor_count, found.shared_memory_per_block_optin, (found.major, found.minor))


def _library(cell: Cell, chosen: Plan, dtype: torch.dtype, width: int) -> Any:
    return _module(cell, chosen, dtype, width, torch.cuda.current_device())


@cache
def _module(cell: Cell, chosen: Plan, dtype: torch.dtype, width: int, _index: int) -> Any:
    """For the current device, which is the one of that number: a host may have GPUs of several architectures."""
    found = extension(cell, chosen, dtype, width)
    return open_library(build.build(found, build.local_arch(found)), cell)


def _call(
    chosen: Plan,
    main: Tensor,
    extras: Sequence[Tensor],
    w: Tensor,
    history: Tensor,
    a: Tensor,
    mask: Tensor | None,
) -> Call:
    device = history.device
    call = make_call(main, extras, w, history, a, mask)
    call.error, call.stream = error_word(device), torch.cuda.current_stream(device).cuda_stream
    call.rows, call.groups, call.delay, call.timeout_ns = chosen.rows, chosen.groups, chosen.delay, TIMEOUT_NS
    return call


def _check(cell: Cell, chosen: Plan, said: bytes | None) -> None:
    if said is not None:
        raise KernelError(f"kernel {cell.name} ({chosen}): {said.decode()}")


def _steps_are_untied(cell: Cell, tied: Tensor | None) -> None:
    if tied is not None:
        raise KernelError(
            f"{cell.name}: no persistent launch holds a matrix of this size, and a step apart is not tied"
        )


def _multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a @ b in float32."""
    if a.dtype == torch.float32:
        torch.mm(a, b, out=out)
    else:
        torch.mm(a, b, out_dtype=torch.float32, out=out)
