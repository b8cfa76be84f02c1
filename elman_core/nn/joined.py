"""Several linear maps of one input as one product: x is read once, its gradient is written once. And one of an odd width."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS = 4096
"""Rows of x from which on a copy of the weights, one behind the other or with rows of zeros, costs less than what it spares."""

ALIGN = 8


def joins(modules: Sequence[nn.Module], x: Tensor) -> bool:
    """Whether `joined` pays: several maps, many rows, on a GPU. On a CPU a product has no cost beside its arithmetic."""
    return len(modules) > 1 and many_rows(x)


def many_rows(x: Tensor) -> bool:
    """Whether x has so many rows, on a GPU, that to copy the weights costs little beside their product."""
    return x.is_cuda and x.shape[:-1].numel() >= ROWS


def joined(modules: Sequence[nn.Linear], x: Tensor) -> list[Tensor]:
    """`[module(x), ...]` of maps without bias, by one product; what it returns are views of one tensor.

    Each begins at a multiple of 8 columns, 16 bytes of 16-bit numbers, and rows lie so far apart: what kernels read in place.

    Args:
        modules: of one dtype, K inputs each. x: (..., K).
    """
    weights: list[Tensor] = []  # each followed by rows of zeros, or by none
    for module in modules:
        weights += [module.weight, module.weight.new_zeros(-module.out_features % ALIGN, x.shape[-1])]
    y = F.linear(x, torch.cat(weights))
    return list(y.split([len(weight) for weight in weights], -1)[::2])


def padded(weight: Tensor, x: Tensor) -> Tensor:
    """x Wᵀ for W (N, K) with rows of zeros behind it up to a multiple of 8."""
    return F.linear(x, F.pad(weight, (0, 0, 0, -len(weight) % ALIGN)))
