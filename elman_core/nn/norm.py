"""RMS normalisation inside a mixer (per head, gated). The norm in front of a mixer belongs to the ladder."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .functional import compute_dtype


class RMSNorm(nn.Module):
    """weight x (mean(x²) + eps)^(-1/2) over the last dimension, in float32 or float64, returned in the dtype of x."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        full = x.to(compute_dtype(x))
        scaled = full * torch.rsqrt(full.square().mean(-1, keepdim=True) + self.eps)
        return (scaled * self.weight.to(full.dtype)).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"
