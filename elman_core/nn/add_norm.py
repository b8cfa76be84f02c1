"""Add and RMS norm in one pass over memory: the one place where a residual stream is written.

    R' = R + x,   rho = (mean R'^2 + eps)^(-1/2),   n = w rho R'
    with q = w dn:   dR = dx = dR' + rho q - rho^3 R' mean(R' q),   dw = sum rho R' dn

The stream is float32 (float64 for float64) whatever x and n are. Written apart, these are seven passes forward and ten
backward with bfloat16 branches, 36 and 40 bytes an element; together 12 and 16. Two operators carry it, known to
`torch.compile` and CUDA graphs: on a GPU one Triton kernel each way (add_norm_triton.py), elsewhere plain PyTorch. The few rows
of decoding have a kernel of their own (`elman_core.kernels.decode`).

Shapes: D width; any number of leading dimensions, usually (B batch, T time), N of them in all.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from elman_core.kernels.decode import op as decode
from elman_core.kernels.runtime import operator, tensors, transformed

from .functional import without_autocast

FUSED = (torch.float32, torch.bfloat16, torch.float16)
"""What Triton's kernels read, and compute in float32."""
WIDEST = 16384
"""Width that the fused kernel takes at most: a row is held in registers."""


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """`R' = R + x`, `n = weight * R' / sqrt(mean(R'^2) + eps)`; returns `(n, R')`.

    Args:
        x: (..., D) output of the branch below, any floating dtype and layout; n lies in memory as x does.
        residual: (..., D) the stream so far, float32 or float64; None where it starts, so that R' = x.
        weight: (D,) gains.
        eps: added to the mean square.
        out_dtype: dtype of n; None for the weight's.

    Returns:
        n in `out_dtype`, and the stream in float32 (float64 if `x` or the stream is), whatever the compute dtype.
    """
    out_dtype = weight.dtype if out_dtype is None else out_dtype
    if decode.takes_norm(x, residual, weight, out_dtype):
        return decode.norm(x, residual, weight, eps)
    double = x.dtype == torch.float64 or (residual is not None and residual.dtype == torch.float64)
    wide = torch.float64 if double else torch.float32
    if transformed():
        stream = x.to(wide) if residual is None else residual.to(wide) + x
        return _plain(stream, weight, eps)[0].to(out_dtype), stream
    # A dispatcher is what gradients, compilers and graphs need; a byte at a time on a CPU it would cost more than the norm.
    plain = not x.is_cuda and not torch.is_grad_enabled() and not torch.compiler.is_compiling()
    if residual is None:
        stream = x.to(wide)
        return (_run_norm if plain else _norm)(stream, weight, eps, out_dtype)[0], stream
    normed, stream, _ = (_run_add_norm if plain else _add_norm)(x, residual.to(wide), weight, eps, out_dtype)
    return normed, stream


# The operators: (n, R', rho) and (n, rho), rho (N,) in the dtype of the stream, for the backward alone.


def _run_add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: torch.dtype) -> tuple[Tensor, ...]:
    if _fuses(x, residual, weight):
        with torch.cuda.device(x.device):  # Triton launches on the current one
            return _kernels().add_norm(x, residual, weight, eps, out)
    stream = _laid_out(residual + x, residual, residual.dtype)
    normed, rho = _plain(stream, weight, eps)
    return _laid_out(normed, x, out), stream, rho


def _run_norm(stream: Tensor, weight: Tensor, eps: float, out: torch.dtype) -> tuple[Tensor, Tensor]:
    if _fuses(stream, stream, weight):
        with torch.cuda.device(stream.device):
            normed, _, rho = _kernels().add_norm(stream, None, weight, eps, out)
        return normed, rho
    normed, rho = _plain(stream, weight, eps)
    return _laid_out(normed, stream, out), rho


def _run_backward(
    dn: Tensor,
    d_stream: Tensor | None,
    stream: Tensor,
    rho: Tensor,
    weight: Tensor,
    x_dtype: torch.dtype,
    x_strides: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """(dR as the stream, dx as x lay in memory, or empty where dR is in its dtype, dw)."""
    d_x = _empty_gradient(stream, x_dtype, x_strides)
    if _fuses(dn, stream, weight):
        with torch.cuda.device(dn.device):
            d, dw = _kernels().add_norm_backward(dn, d_stream, stream, rho, weight, d_x)
        return d, d_x, dw
    with without_autocast(dn):
        dn, scale, w = dn.to(stream.dtype), rho.view(*stream.shape[:-1], 1), weight.to(stream.dtype)
        product = dn * stream
        dw = rho.view(1, -1).mm(product.reshape(-1, stream.shape[-1])).squeeze(0).to(weight.dtype)
        shrink = product.matmul(w).unsqueeze(-1).mul_(scale.pow(3)).div_(-stream.shape[-1])
        d = torch.mul(dn, w, out=product).mul_(scale).addcmul_(stream, shrink)
        d = d if d_stream is None else d_stream + d
    if d_x.numel():
        d_x.copy_(d)
    return _laid_out(d, stream, stream.dtype), d_x, dw


def _plain(stream: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    with without_autocast(stream):  # which would take the sum of squares in 16 bits
        rho = torch.linalg.vecdot(stream, stream).div_(stream.shape[-1]).add_(eps).rsqrt_()
        return (stream * rho.unsqueeze(-1)).mul_(weight.to(stream.dtype)), rho.flatten()


def _laid_out(value: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    """`value` in a dtype and in the layout of another tensor."""
    if value.dtype == dtype and value.stride() == _dense_strides(like):
        return value
    return torch.empty_like(like, dtype=dtype).copy_(value)


def _dense_strides(x: Tensor) -> tuple[int, ...]:
    """Those of `torch.empty_like(x)`."""
    return x.stride() if x.is_contiguous() else torch.empty_like(x, device="meta").stride()


def _empty_gradient(stream: Tensor, dtype: torch.dtype, strides: list[int]) -> Tensor:
    if dtype == stream.dtype:
        return stream.new_empty(0)
    return torch.empty_strided(stream.shape, strides, dtype=dtype, device=stream.device)


def _fuses(x: Tensor, stream: Tensor, weight: Tensor) -> bool:
    """Whether the kernel takes it: on a GPU, in 32 bits or fewer, unless ELMAN_KERNELS=off."""
    return (
        x.is_cuda
        and x.dtype in FUSED
        and stream.dtype == torch.float32
        and weight.dtype in FUSED
        and 0 < stream.shape[-1] <= WIDEST
        and x.numel() > 0
        and triton_runs()
    )


def triton_runs() -> bool:
    """Whether kernels in Triton run on a GPU: it is installed, and plain PyTorch is not asked for."""
    return not kernels_are_off() and has_triton()


def kernels_are_off() -> bool:
    """Whether plain PyTorch is asked for: ELMAN_KERNELS=off."""
    return os.environ.get("ELMAN_KERNELS") == "off"


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed: it comes with PyTorch for NVIDIA GPUs."""
    return importlib.util.find_spec("triton") is not None


def _kernels() -> Any:
    from . import add_norm_triton

    return add_norm_triton


def _fake_add_norm(
    x: Tensor, residual: Tensor, _weight: Tensor, _eps: float, out: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    rho = residual.new_empty(residual.shape[:-1].numel())
    return torch.empty_like(x, dtype=out), torch.empty_like(residual), rho


def _fake_norm(stream: Tensor, _weight: Tensor, _eps: float, out: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.empty_like(stream, dtype=out), stream.new_empty(stream.shape[:-1].numel())


def _fake_backward(
    _dn: Tensor,
    _d_stream: Tensor | None,
    stream: Tensor,
    _rho: Tensor,
    weight: Tensor,
    dtype: torch.dtype,
    strides: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(stream), _empty_gradient(stream, dtype, strides), torch.empty_like(weight)


def _save_add_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _save(ctx, inputs[0], inputs[2], *output[1:])


def _save_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _save(ctx, inputs[0], inputs[1], inputs[0], output[1])


def _save(ctx: Any, x: Tensor, weight: Tensor, stream: Tensor, rho: Tensor) -> None:
    ctx.set_materialize_grads(False)  # where nothing reads the stream above, there is no gradient to add
    ctx.save_for_backward(stream, rho, weight)
    ctx.x_dtype, ctx.x_strides = x.dtype, _dense_strides(x)


def _gradients(
    ctx: Any, dn: Tensor | None, d_stream: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dR, dx, dw)."""
    if dn is None:
        return d_stream, None if d_stream is None else d_stream.to(ctx.x_dtype), None
    stream, rho, weight = ctx.saved_tensors
    d, d_x, dw = _backward(dn, d_stream, stream, rho, weight, ctx.x_dtype, ctx.x_strides)
    return d, d if ctx.x_dtype == stream.dtype else d_x, dw


def _differentiate_add_norm(
    ctx: Any, dn: Tensor | None, d_stream: Tensor | None, _rho: None
) -> tuple[Tensor | None, ...]:
    d, d_x, dw = _gradients(ctx, dn, d_stream)
    return d_x, d, dw, None, None


def _differentiate_norm(ctx: Any, dn: Tensor | None, _rho: None) -> tuple[Tensor | None, ...]:
    d, _, dw = _gradients(ctx, dn, None)
    return d, dw, None, None


_backward = operator(
    "add_rms_norm_backward(Tensor dn, Tensor? d_stream, Tensor stream, Tensor rho, Tensor weight, ScalarType x_dtype,"
    f" SymInt[] x_strides) -> {tensors(3)}",
    _run_backward,
    _fake_backward,
)
_add_norm = operator(
    f"add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, ScalarType out) -> {tensors(3)}",
    _run_add_norm,
    _fake_add_norm,
    _save_add_norm,
    _differentiate_add_norm,
)
_norm = operator(
    f"rms_norm(Tensor stream, Tensor weight, float eps, ScalarType out) -> {tensors(2)}",
    _run_norm,
    _fake_norm,
    _save_norm,
    _differentiate_norm,
)
