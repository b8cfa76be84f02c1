"""The pre-norm of a rung: `elman_core.nn.add_rms_norm` with its gains, in the dtype that mixers compute in."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from elman_core.kernels.autocast import autocast_dtype
from elman_core.nn import add_rms_norm


class RMSNorm(nn.Module):
    """Gains of a pre-norm; `forward(x, residual)` adds and normalises."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, residual, self.weight, self.eps, autocast_dtype(self.weight))

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"
