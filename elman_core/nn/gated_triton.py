"""The Triton kernels of `gated.py`: a program takes a block of rows, each one head of one token. With a norm, programs of the
backward walk on and keep their share of dw in registers; the shares are summed in a fixed order. Imported on a GPU only.

Shapes: N rows (tokens times H heads), V width of a head, P programs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from elman_core.kernels.runtime import refuse_second_derivatives

from .add_norm_triton import PROGRAMS_PER_SM, multiprocessors

ELEMENTS, WARPS = 2048, 8
"""Of a block."""


@triton.jit
def _places(block, rows, heads, stride, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of a block: places where rows lie one behind the other, places in the gate, and which exist."""
    row = block * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    token = (row // heads).to(tl.int64)
    dense = row.to(tl.int64)[:, None] * width + column
    inside = (row < rows)[:, None] & (column < width)
    return dense, (token * stride + (row % heads) * width)[:, None] + column, inside


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    o, gate, weight, y, rows, heads, stride, width, eps,
    NORM: tl.constexpr, SILU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    dense, beside, inside = _places(tl.program_id(0), rows, heads, stride, width, ROWS, COLUMNS)
    value = tl.load(o + dense, mask=inside, other=0.0).to(tl.float32)
    logit = tl.load(gate + beside, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        column = tl.arange(0, COLUMNS)
        gain = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
        value *= (1.0 / tl.sqrt(tl.sum(value * value, 1) / width + eps))[:, None] * gain[None, :]
    if SILU:
        value *= logit
    tl.store(y + dense, (value * tl.sigmoid(logit)).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    dy, o, gate, weight, d_o, d_gate, shares, rows, heads, stride, width, eps,
    NORM: tl.constexpr, SILU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, COLUMNS)
    gain = tl.full((COLUMNS,), 1.0, tl.float32)
    share = tl.zeros((COLUMNS,), tl.float32)
    if NORM:
        gain = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    for block in range(program, tl.cdiv(rows, ROWS), programs):
        dense, beside, inside = _places(block, rows, heads, stride, width, ROWS, COLUMNS)
        grad = tl.load(dy + dense, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(o + dense, mask=inside, other=0.0).to(tl.float32)
        logit = tl.load(gate + beside, mask=inside, other=0.0).to(tl.float32)
        opened = tl.sigmoid(logit)
        slope = opened * tl.sigmoid(-logit)
        if SILU:
            slope = opened + logit * slope
            opened *= logit
        out = grad * opened
        if NORM:
            scale = (1.0 / tl.sqrt(tl.sum(value * value, 1) / width + eps))[:, None]
            value *= scale
            share += tl.sum(out * value, 0)
            out *= gain[None, :]
            out = scale * (out - value * (tl.sum(value * out, 1) / width)[:, None])
            value *= gain[None, :]
        tl.store(d_o + dense, out.to(d_o.dtype.element_ty), mask=inside)
        tl.store(d_gate + dense, (grad * value * slope).to(d_gate.dtype.element_ty), mask=inside)
    if NORM:
        tl.store(shares + program * width + column, share, mask=column < width)


class Gated(torch.autograd.Function):
    """y (..., H, V) of o (..., H, V), gate (..., H V) and the norm's weight (V) or None."""

    @staticmethod
    def forward(o: Tensor, gate: Tensor, weight: Tensor | None, silu: bool, eps: float) -> Tensor:
        o, gate = o.contiguous(), _rows(gate)
        y = torch.empty_like(o)
        grid, given, constants = _launch(o, gate, weight, silu, eps)
        with torch.cuda.device_of(o):
            _forward[(grid,)](o, gate, weight, y, *given, **constants)
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004
        ctx.save_for_backward(*inputs[:3])
        ctx.rest = inputs[3:]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives("gated")
        o, gate, weight = ctx.saved_tensors
        d_gate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        o, gate = o.contiguous(), _rows(gate)
        d_o = torch.empty_like(o)
        blocks, given, constants = _launch(o, gate, weight, *ctx.rest)
        programs = min(blocks, PROGRAMS_PER_SM * multiprocessors(o.device)) if weight is not None else blocks
        shares = o.new_empty(programs if weight is not None else 0, o.shape[-1], dtype=torch.float32)
        with torch.cuda.device_of(o):
            _backward[(programs,)](dy.contiguous(), o, gate, weight, d_o, d_gate, shares, *given, **constants)
        return d_o, d_gate, None if weight is None else shares.sum(0).to(weight.dtype), None, None


def _rows(gate: Tensor) -> Tensor:
    """The gate as (tokens, H V), its columns adjacent; copied where it lies otherwise."""
    rows = gate.reshape(-1, gate.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _launch(o: Tensor, gate: Tensor, weight: Tensor | None, silu: bool, eps: float) -> tuple[int, Any, dict[str, Any]]:
    """The number of blocks, the sizes that both kernels take, and what they are compiled for."""
    width, count = o.shape[-1], o.shape[:-1].numel()
    columns = triton.next_power_of_2(width)
    rows = max(1, ELEMENTS // columns)
    constants = {"NORM": weight is not None, "SILU": silu, "ROWS": rows, "COLUMNS": columns, "num_warps": WARPS}
    return -(-count // rows), (count, o.shape[-2], gate.stride(0), width, eps), constants
