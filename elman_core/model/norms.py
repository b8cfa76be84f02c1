"""Add and RMS norm: the one place where the residual stream is written.

Shapes: D width; the functions take any number of leading dimensions, usually (B batch, T time).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """`R' = R + x`, `n = weight * R' / sqrt(mean(R'^2) + eps)`; returns `(n, R')`.

    Args:
        x: (..., D) output of the branch below, any floating dtype.
        residual: (..., D) the stream so far, float32 or float64; None where it starts, so that R' = x.
        weight: (D,) gains.
        eps: added to the mean square.
        out_dtype: dtype of n; None for the weight's.

    Returns:
        n in `out_dtype`, and the stream in float32 (float64 if `x` or the stream is), whatever the compute dtype.
    """
    double = x.dtype == torch.float64 or (residual is not None and residual.dtype == torch.float64)
    x = x.to(torch.float64 if double else torch.float32)
    stream = x if residual is None else residual + x
    weight_wide = weight.to(stream.dtype)
    if stream.device.type != "cpu":
        normed = F.rms_norm(stream, weight.shape, weight_wide, eps)
    elif torch.is_grad_enabled():
        normed = _RMSNorm.apply(stream, weight_wide, eps)
    else:
        normed = _normalize(stream, weight_wide, eps)[0]
    return normed.to(weight.dtype if out_dtype is None else out_dtype), stream


def _normalize(r: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if torch.is_autocast_enabled("cpu"):  # which would take the sum of squares in 16 bits
        with torch.autocast("cpu", enabled=False):
            return _normalize(r, weight, eps)
    rho = torch.linalg.vecdot(r, r).unsqueeze(-1).div_(r.shape[-1]).add_(eps).rsqrt_()
    return (r * rho).mul_(weight), rho


class _RMSNorm(torch.autograd.Function):
    """torch's rms_norm has no fused backward on CPU: this one makes three passes over memory instead of ten.

    With rho = (mean r^2 + eps)^(-1/2) and q = w dn:  dr = rho q - rho^3 r mean(r q),  dw = sum rho r dn.
    """

    @staticmethod
    def forward(ctx: Any, r: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed, rho = _normalize(r, weight, eps)
        ctx.save_for_backward(r, rho, weight)
        return normed

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        r, rho, weight = ctx.saved_tensors
        with torch.autocast("cpu", enabled=False):
            product = grad * r
            d_weight = None
            if ctx.needs_input_grad[1]:
                d_weight = rho.reshape(1, -1).mm(product.flatten(0, -2)).squeeze(0)
            scale = product.matmul(weight).unsqueeze(-1).mul_(rho.pow(3)).div_(-weight.shape[0])
            d_r = torch.mul(grad, weight, out=product).mul_(rho).addcmul_(r, scale)
        return d_r, d_weight, None


def compute_dtype(weight: Tensor) -> torch.dtype:
    """The dtype in which mixers are to compute: autocast's where it is on for the device, else the weights'."""
    device = weight.device.type
    if weight.dtype != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return weight.dtype


class RMSNorm(nn.Module):
    """Gains of a pre-norm; `forward(x, residual)` adds and normalises."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, residual, self.weight, self.eps, compute_dtype(self.weight))

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"
