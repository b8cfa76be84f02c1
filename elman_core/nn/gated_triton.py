"""The Triton kernel of `gated.py`, forward and back: a program takes a block of rows, each one head of one token. Imported
on a GPU only."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from elman_core.kernels.runtime import refuse_second_derivatives, without_autocast

ELEMENTS, WARPS = 2048, 8
"""Elements and warps of a block."""
BLOCKS = 8
"""Blocks that one program processes before it adds its share to the gradient of the norm's weight."""


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]
    o, gate, weight, y, dy, d_o, d_gate, shares, rows, heads, stride_o, stride_gate, stride_d, width, eps,
    NORM: tl.constexpr, SILU: tl.constexpr, BACK: tl.constexpr, KEEP: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, COLUMNS)
    if NORM:
        gain = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
        share = tl.zeros((ROWS, COLUMNS), tl.float32)
    for block in range(BLOCKS):
        row = (tl.program_id(0) * BLOCKS + block) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        at = row.to(tl.int64)[:, None] * width + column[None, :]
        token, within = (row // heads).to(tl.int64)[:, None], (row % heads * width)[:, None] + column[None, :]
        value = tl.load(o + token * stride_o + within, mask=inside, other=0.0).to(tl.float32)
        logit = tl.load(gate + token * stride_gate + within, mask=inside, other=0.0).to(tl.float32)
        low = tl.exp(-tl.abs(logit))  # one exponential for both, and nothing cancels
        part = 1.0 / (1.0 + low)
        opened = tl.where(logit < 0.0, low, 1.0) * part
        slope = low * part * part
        if SILU:
            slope = opened + logit * slope
            opened *= logit
        normed = value
        if NORM:
            scale = (1.0 / tl.sqrt(tl.sum(value * value, 1) / width + eps))[:, None]
            value *= scale
            normed = value * gain
        if KEEP:
            tl.store(y + at, (normed * opened).to(y.dtype.element_ty), mask=inside)
        if BACK:
            grad = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
            opening = grad * normed * slope
            tl.store(d_gate + token * stride_d + within, opening.to(d_gate.dtype.element_ty), mask=inside)
            grad *= opened
            if NORM:
                share += grad * value
                grad *= gain
                grad = scale * (grad - value * (tl.sum(value * grad, 1) / width)[:, None])
            tl.store(d_o + token * stride_d + within, grad.to(d_o.dtype.element_ty), mask=inside)
    if BACK and NORM:
        tl.store(shares + tl.program_id(0) * width + column, tl.sum(share, 0), mask=column < width)


class Gated(torch.autograd.Function):
    """y of o (..., H, V), gate (..., H V) and the norm's weight (V) or None; or y Wᵀ, W (D, H V): then y is not kept, and the
    backward recomputes it while it reads the same tensors."""

    @staticmethod
    def forward(o: Tensor, gate: Tensor, weight: Tensor | None, out: Tensor | None, silu: bool, eps: float) -> Tensor:
        y, *_ = _launch(o, gate, weight, silu, eps)
        assert y is not None
        return y if out is None else F.linear(y.flatten(-2), out)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004
        ctx.save_for_backward(*inputs[:4])
        ctx.rest = inputs[4:]

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives("gated")
        (o, gate, weight, out), (silu, eps) = ctx.saved_tensors, ctx.rest
        with without_autocast(d):  # `backward()` may be called inside it
            dy = d if out is None else d.matmul(out).view(o.shape)
            y, *gradients = _launch(o, gate, weight, silu, eps, dy, keep=out is not None)
            d_out = None if y is None else d.flatten(0, -2).t().mm(y.flatten(0, -3).flatten(1))
        return *gradients, d_out, None, None


def _launch(
    o: Tensor, gate: Tensor, weight: Tensor | None, silu: bool, eps: float, dy: Tensor | None = None, keep: bool = True
) -> tuple[Tensor | None, ...]:
    """Returns y if it is kept; with dy, also the gradients of o, gate and weight.

    Where o is a slice, as when one product makes gate and o, the gradients of both are adjacent, gate first.
    """
    width, whole = o.shape[-1], gate.shape[-1]
    value, beside = (x.reshape(-1, whole) for x in (o, gate))
    value, beside = (x if x.stride(-1) == 1 else x.contiguous() for x in (value, beside))
    count, columns = o.shape[:-1].numel(), triton.next_power_of_2(width)
    rows = max(1, ELEMENTS // columns)
    back = dy is not None
    blocks = BLOCKS if back and weight is not None else 1
    programs = triton.cdiv(count, rows * blocks)
    y = o.new_empty(o.shape) if keep else None
    if back and not o.is_contiguous() and o.dtype == gate.dtype:
        d_gate, d_o = o.new_empty(len(value), 2 * whole).split(whole, 1)
    else:
        d_gate, d_o = (x.new_empty(len(value), whole) if back else None for x in (gate, o))
    shares = o.new_empty(programs, width, dtype=torch.float32) if back and weight is not None else None
    with torch.cuda.device_of(o):
        _kernel[(programs,)](
            value, beside, weight, y, None if dy is None else dy.contiguous(), d_o, d_gate, shares, count, o.shape[-2],
            value.stride(0), beside.stride(0), whole if d_o is None else d_o.stride(0), width, eps,
            NORM=weight is not None, SILU=silu, BACK=back, KEEP=keep, ROWS=rows, COLUMNS=columns, BLOCKS=blocks,
            num_warps=WARPS,
        )  # fmt: skip
    d_weight = None if shares is None or weight is None else shares.sum(0).to(weight.dtype)
    if d_o is None or d_gate is None:
        return y, None, None, d_weight
    return y, d_o.view(o.shape), d_gate.view(gate.shape), d_weight
