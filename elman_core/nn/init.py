"""In-place initialisers, beside those of `torch.nn.init`. All work on the meta device and in 16 bits."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .functional import compute_dtype

xavier_uniform_ = nn.init.xavier_uniform_
"""U(-a, a) with a = gain sqrt(6 / (rows + columns)) of the matrix as stored."""


@torch.no_grad()
def orthogonal_(weight: Tensor, gain: float = 1.0) -> Tensor:
    """`gain` times a (semi-)orthogonal matrix, uniform over all of them; 16-bit weights are drawn in float32."""
    if weight.dtype == compute_dtype(weight):
        return nn.init.orthogonal_(weight, gain)
    return weight.copy_(nn.init.orthogonal_(torch.empty_like(weight, dtype=torch.float32), gain))


@torch.no_grad()
def s4d_(weight: Tensor, low: float = 0.99, high: float = 0.9999) -> Tensor:
    """Symmetric, Q diag(linspace(low, high)) Qᵀ, Q uniform over the orthogonal matrices: memories of 1/(1 - eigenvalue)."""
    q = nn.init.orthogonal_(torch.empty_like(weight, dtype=compute_dtype(weight)))
    eigenvalues = torch.linspace(low, high, weight.shape[0], dtype=q.dtype, device=q.device)
    return weight.copy_(q * eigenvalues @ q.T)


@torch.no_grad()
def mamba_decay_(
    a_log: Tensor, dt_bias: Tensor, *, a_min: float = 0.0, a_max: float = 16.0, dt: tuple[float, float] = (1e-3, 1e-1)
) -> None:
    """The initial decays of Mamba-2: A ~ U(a_min, a_max), softplus(dt_bias) log-uniform in `dt` and at least 1e-4.

    At a = 0 the decay exp(-A dt) then lies between exp(-a_max dt[1]) and 1.
    """
    draw = torch.empty_like(a_log, dtype=compute_dtype(a_log))
    a_log.copy_(nn.init.uniform_(draw, a_min, a_max).clamp(min=torch.finfo(torch.float32).tiny).log())
    draw = torch.empty_like(dt_bias, dtype=draw.dtype)
    steps = nn.init.uniform_(draw, math.log(dt[0]), math.log(dt[1])).exp().clamp(min=1e-4)
    dt_bias.copy_(steps + torch.log(-torch.expm1(-steps)))  # the inverse of softplus
