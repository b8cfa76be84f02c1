"""Causal depthwise convolution over time. Its window is a state, so pieces equal the whole."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from elman_core.kernels.causal_conv.op import causal_conv

from .computed import Wide


class CausalConv(nn.Module):
    """y_t = bias + sum_j weight_j u_{t-(K-1)+j}, channel by channel; before the start u is 0, or the window of the last call.

    A masked step does not count: the window stays the same, and the next step sees the inputs before it.

    Args:
        channels: C. width: K, at least 2. bias: whether there is one.
        dim: the axis of time of the input, 0 for (T, B, C) and 1 for (B, T, C). silu: whether y passes SiLU.
    """

    def __init__(self, channels: int, width: int = 4, *, bias: bool = True, dim: int = 0, silu: bool = False) -> None:
        super().__init__()
        self.width, self.dim, self.silu = width, dim, silu
        self.weight = nn.Parameter(torch.empty(channels, 1, width))  # the shape of a depthwise torch.nn.Conv1d
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.wide = Wide()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """U(-1/sqrt(K), 1/sqrt(K)), as torch.nn.Conv1d."""
        bound = 1 / math.sqrt(self.width)
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(
        self, u: Tensor, window_BKC: Tensor | None = None, mask: Tensor | None = None, starts: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `causal_conv` (elman_core/kernels/causal_conv/op.py): (y, the new window)."""
        weight_C1K, *bias = self.wide(*(p for p in (self.weight, self.bias) if p is not None))
        weight_CK, bias_C = weight_C1K.squeeze(1), bias[0] if bias else None
        if self.dim == 0:
            return causal_conv(u, weight_CK, bias_C, window_BKC, mask, starts, silu=self.silu)
        mask, starts = (None if x is None else x.transpose(0, 1) for x in (mask, starts))
        y, window = causal_conv(u.transpose(0, 1), weight_CK, bias_C, window_BKC, mask, starts, silu=self.silu)
        return y.transpose(0, 1), window
