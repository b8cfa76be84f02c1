"""The Triton kernels of `add_norm.py`: a row of the stream is one program forward; backward, a program walks many rows and
keeps its share of dw in registers, and the shares are summed in a fixed order: the same bits twice. Imported on a GPU only.

Rows are addressed as (first, second) leading index with two strides, so that time-major views are read and written in place.

Shapes: D width, N rows, P programs.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS_PER_SM = 8
"""In the backward: enough warps to hide memory, few enough shares of dw."""


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    x, residual, weight, normed, stream, rho, inner, x0, x1, r0, r1, n0, n1, s0, s1, width, eps,
    ADDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first, second = row // inner, row % inner
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    value = tl.load(x + first * x0 + second * x1 + columns, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        value += tl.load(residual + first * r0 + second * r1 + columns, mask=inside, other=0.0)
        tl.store(stream + first * s0 + second * s1 + columns, value, mask=inside)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / width + eps)
    tl.store(rho + row, scale)
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        normed + first * n0 + second * n1 + columns, (value * scale * gain).to(normed.dtype.element_ty), mask=inside
    )


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    dn, d_stream, stream, rho, weight, d, d_x, shares, rows, inner, g0, g1, a0, a1, s0, s1, d0, d1, x0, x1, width,
    ADDS: tl.constexpr, NARROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    share = tl.zeros((BLOCK,), tl.float32)
    for row in range(program, rows, programs):
        first, second = row // inner, row % inner
        value = tl.load(stream + first * s0 + second * s1 + columns, mask=inside, other=0.0)
        grad = tl.load(dn + first * g0 + second * g1 + columns, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(rho + row)
        share += scale * value * grad
        grad *= gain
        shrink = scale * scale * scale * tl.sum(value * grad, 0) / width
        out = scale * grad - shrink * value
        if ADDS:
            out += tl.load(d_stream + first * a0 + second * a1 + columns, mask=inside, other=0.0)
        tl.store(d + first * d0 + second * d1 + columns, out, mask=inside)
        if NARROW:
            tl.store(d_x + first * x0 + second * x1 + columns, out.to(d_x.dtype.element_ty), mask=inside)
    tl.store(shares + program * width + columns, share, mask=inside)


def add_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """(n, R', rho); R' is x itself where nothing is added."""
    normed = torch.empty_like(x, dtype=out)
    stream = x if residual is None else torch.empty_like(residual)
    x_rows, n_rows, s_rows = _rows(x), _rows(normed), _rows(stream)
    r_rows = x_rows if residual is None else _rows(residual)
    width, count = x.shape[-1], x.shape[:-1].numel()
    rho = torch.empty(count, dtype=torch.float32, device=x.device)
    block, warps = _block(width)
    _forward[(count,)](
        x_rows, r_rows, weight.contiguous(), n_rows, s_rows, rho, x_rows.shape[1], *x_rows.stride()[:2],
        *r_rows.stride()[:2], *n_rows.stride()[:2], *s_rows.stride()[:2], width, eps,
        ADDS=residual is not None, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return _filled(normed, n_rows), _filled(stream, s_rows), rho


def add_norm_backward(
    dn: Tensor, d_stream: Tensor | None, stream: Tensor, rho: Tensor, weight: Tensor, d_x: Tensor
) -> tuple[Tensor, Tensor]:
    """(dR, dw); fills d_x, a second copy of dR in the dtype and layout of x, if it is not empty."""
    d = torch.empty_like(stream)
    g_rows, s_rows, d_rows = _rows(dn), _rows(stream), _rows(d)
    a_rows = s_rows if d_stream is None else _rows(d_stream)
    x_rows = _rows(d_x) if d_x.numel() else d_rows
    width, count = stream.shape[-1], stream.shape[:-1].numel()
    programs = min(count, PROGRAMS_PER_SM * _multiprocessors(stream.device))
    shares = torch.empty(programs, width, dtype=torch.float32, device=stream.device)
    block, warps = _block(width)
    _backward[(programs,)](
        g_rows, a_rows, s_rows, rho, weight.contiguous(), d_rows, x_rows, shares, count, s_rows.shape[1],
        *g_rows.stride()[:2], *a_rows.stride()[:2], *s_rows.stride()[:2], *d_rows.stride()[:2], *x_rows.stride()[:2], width,
        ADDS=d_stream is not None, NARROW=d_x.numel() > 0, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    if d_x.numel():
        _filled(d_x, x_rows)
    return _filled(d, d_rows), shares.sum(0).to(weight.dtype)


def _filled(tensor: Tensor, rows: Tensor) -> Tensor:
    """`tensor`, after a kernel filled its `_rows`."""
    return tensor if rows.data_ptr() == tensor.data_ptr() else tensor.copy_(rows.view(tensor.shape))


def _rows(tensor: Tensor) -> Tensor:
    """The same memory as (first, second, D) with D contiguous; copied where it is laid out otherwise."""
    if tensor.stride(-1) != 1:
        tensor = tensor.contiguous()
    if tensor.ndim == 3:
        return tensor
    if tensor.ndim < 3:
        return tensor.reshape(1, -1, tensor.shape[-1])
    return tensor.flatten(0, -3) if tensor.is_contiguous() else tensor.contiguous().flatten(0, -3)


def _block(width: int) -> tuple[int, int]:
    """Columns of a program, a power of two, and its warps."""
    block = triton.next_power_of_2(width)
    return block, min(16, max(1, block // 256))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    properties: Any = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return properties.multi_processor_count if properties is not None else 1
