"""Add and RMS norm in one pass over memory: the one place where a residual stream is written.

    R' = R + x,   rho = (mean R'^2 + eps)^(-1/2),   n = w rho R'
    with q = w dn:   dR = dx = dR' + rho q - rho^3 R' mean(R' q),   dw = sum rho R' dn

The stream is float32 (float64 for float64) whatever x and n are. Computed separately, these are seven passes
forward and ten backward with bfloat16 branches, 36 and 40 bytes per element; together 12 and 16. An operator that
`torch.compile` and CUDA graphs know contains both: on a GPU one Triton kernel in each direction (add_norm_triton.py),
elsewhere plain PyTorch. The few rows of decoding have their own kernel (`elman_core.kernels.decode`).

Shapes: D width; any number of leading dimensions, usually (B batch, T time), N of them in all.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor

from elman_core.kernels.decode import op as decode
from elman_core.kernels.runtime import mode, operator, tensors, transformed

from .functional import without_autocast

FUSED = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that Triton's kernels read; they compute in float32."""
WIDEST = 16384
"""The largest width of the fused kernel, which keeps a row in registers."""


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """`R' = R + x`, `n = weight * R' / sqrt(mean(R'^2) + eps)`; returns `(n, R')`.

    Args:
        x: (..., D) output of the branch below, any floating dtype and layout; n gets the memory layout of x.
        residual: (..., D) the stream so far, float32 or float64; None at its start, so that R' = x.
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
    x, residual = (x.to(wide), None) if residual is None else (x, residual.to(wide))
    normed, stream, _ = (_run if plain else _op)(x, residual, weight, eps, out_dtype)
    return normed, x if residual is None else stream


# The operator: (n, R', or nothing where that is x, rho (N,) in the dtype of the stream, for the backward alone).


def _run(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    if _fuses(x, x if residual is None else residual, weight):
        with torch.cuda.device(x.device):  # Triton launches on the current one
            normed, stream, rho = _kernels().add_norm(x, residual, weight, eps, out)
    else:
        stream = x if residual is None else _laid_out(residual + x, residual, residual.dtype)
        normed, rho = _plain(stream, weight, eps)
        normed = _laid_out(normed, x, out)
    return normed, x.new_empty(0) if residual is None else stream, rho


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
        dn = dn.to(stream.dtype)
        w = weight.to(stream.dtype)
        scale = rho.view(*stream.shape[:-1], 1)
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
    """The strides of `torch.empty_like(x)`."""
    return x.stride() if x.is_contiguous() else torch.empty_like(x, device="meta").stride()


def _empty_gradient(stream: Tensor, dtype: torch.dtype, strides: list[int]) -> Tensor:
    if dtype == stream.dtype:
        return stream.new_empty(0)
    return torch.empty_strided(stream.shape, strides, dtype=dtype, device=stream.device)


def _fuses(x: Tensor, stream: Tensor, weight: Tensor) -> bool:
    """Whether the kernel runs: on a GPU, in 32 bits or fewer, unless ELMAN_KERNELS=off."""
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
    """Whether Triton kernels run on a GPU: Triton is installed, and the user did not ask for plain PyTorch."""
    return mode() != "off" and has_triton()


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed: it comes with PyTorch for NVIDIA GPUs."""
    return importlib.util.find_spec("triton") is not None


def _kernels() -> Any:
    from . import add_norm_triton

    return add_norm_triton


def _fake(
    x: Tensor, residual: Tensor | None, _weight: Tensor, _eps: float, out: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    stream = x if residual is None else residual
    rho = stream.new_empty(stream[..., 0].numel())  # of a shape it would be a constant in traced code
    return torch.empty_like(x, dtype=out), x.new_empty(0) if residual is None else torch.empty_like(stream), rho


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


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, weight, *_ = inputs
    ctx.set_materialize_grads(False)  # where nothing reads the stream above, there is no gradient to add
    ctx.save_for_backward(x if residual is None else output[1], output[2], weight)
    ctx.x_dtype, ctx.x_strides, ctx.adds = x.dtype, _dense_strides(x), residual is not None


def _differentiate(ctx: Any, dn: Tensor | None, d_stream: Tensor | None, _rho: None) -> tuple[Tensor | None, ...]:
    d_stream = d_stream if ctx.adds else None
    if dn is None:
        return None if d_stream is None else d_stream.to(ctx.x_dtype), d_stream, None, None, None
    stream, rho, weight = ctx.saved_tensors
    d, d_x, dw = _backward(dn, d_stream, stream, rho, weight, ctx.x_dtype, ctx.x_strides)
    return d if ctx.x_dtype == stream.dtype else d_x, d if ctx.adds else None, dw, None, None


_backward = operator(
    "add_rms_norm_backward(Tensor dn, Tensor? d_stream, Tensor stream, Tensor rho, Tensor weight, ScalarType x_dtype,"
    f" SymInt[] x_strides) -> {tensors(3)}",
    _run_backward,
    _fake_backward,
)
_op = operator(
    f"add_rms_norm(Tensor x, Tensor? residual, Tensor weight, float eps, ScalarType out) -> {tensors(3)}",
    _run,
    _fake,
    _save,
    _differentiate,
)
