"""The recurrences of E74, the truth that kernels are compared with. k has length 1; phi is tanh unless said.

S (B, H, N, V), rows keys; k, z (B, H, N, 1), all else beside columns. A diagonal state is one of n heads with N = V = 1.
"""

from typing import Any

import torch
from torch import Tensor

from elman_core.nn import matrix_reference

EPS = 1e-6


def phi(x: Tensor, linear_state: bool = False, norm: str = "") -> Tensor:
    """tanh; x itself; or x over its root mean square ("rms") or its length ("frob"), over all of one state."""
    if norm:
        square = x.square()
        whole = square.mean((-2, -1), keepdim=True) if norm == "rms" else square.sum((-2, -1), keepdim=True)
        # the root of 0 has no gradient: a state of zeros stays zeros, and its gradient is that of x / EPS
        return x / (whole.clamp(min=torch.finfo(x.dtype).tiny).sqrt() + EPS)
    return x if linear_state else torch.tanh(x)


@matrix_reference
def delta(s: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    """S + k (v - Sᵀ k)ᵀ."""
    return phi(torch.addcmul(s, k, v - k.mT @ s), **how)


@matrix_reference
def read(s: Tensor, k: Tensor, z: Tensor, v: Tensor, **how: Any) -> Tensor:
    """S + k (v - Sᵀ (z k))ᵀ."""
    return phi(torch.addcmul(s, k, v - (z * k).mT @ s), **how)


@matrix_reference
def sized(s: Tensor, k: Tensor, v: Tensor, d_g: Tensor, b_g: Tensor, *, diagonal: bool = False, **how: Any) -> Tensor:
    """S + k (g (v - Sᵀ k))ᵀ, g = σ(d_g m + b_g); m is the mean over keys of S², or S if diagonal."""
    size = s if diagonal else s.square().mean(-2, keepdim=True)
    return phi(torch.addcmul(s, k, torch.sigmoid(d_g * size + b_g) * (v - k.mT @ s)), **how)


@matrix_reference
def simple(s: Tensor, k: Tensor, v: Tensor, alpha: Tensor, **how: Any) -> Tensor:
    """alpha S + k vᵀ."""
    return phi(torch.addcmul(alpha * s, k, v), **how)


@matrix_reference
def ema(s: Tensor, k: Tensor, v: Tensor, alpha: Tensor, b_alpha: Tensor, **how: Any) -> Tensor:
    """S diag(a) + k ((1 - a) v)ᵀ, a = σ(alpha + b_alpha)."""
    a = torch.sigmoid(alpha + b_alpha)
    return phi(torch.addcmul(a * s, k, (1 - a) * v), **how)


@matrix_reference
def residual(s: Tensor, k: Tensor, v: Tensor, rho: Tensor, **how: Any) -> Tensor:
    """S + tanh(k (v - Sᵀ k)ᵀ) diag(rho)."""
    return phi(s + rho * torch.tanh(k * (v - k.mT @ s)), **how)


@matrix_reference
def ntm(s: Tensor, k: Tensor, v: Tensor, erase: Tensor, write: Tensor, b_e: Tensor, b_w: Tensor, **how: Any) -> Tensor:
    """S (1 - k eᵀ) + k (w v)ᵀ, element by element, e = σ(erase + b_e), w = σ(write + b_w)."""
    return phi(s * (1 - k * torch.sigmoid(erase + b_e)) + k * (torch.sigmoid(write + b_w) * v), **how)


@matrix_reference
def gated(s: Tensor, k: Tensor, v: Tensor, gate: Tensor, b_g: Tensor, *, surprise: bool = False, **how: Any) -> Tensor:
    """S + k (g δ)ᵀ, δ = v - Sᵀ k, g = σ(gate + b_g), with the mean of δ² inside the σ if `surprise`."""
    d = v - k.mT @ s
    more = d.square().mean(-1, keepdim=True) if surprise else 0
    return phi(torch.addcmul(s, k, torch.sigmoid(gate + b_g + more) * d), **how)
