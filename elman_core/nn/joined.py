"""Several linear maps of one input as one product: x is read once, its gradient is written once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS = 4096
"""Rows of x from which on the copy of the weights, one behind the other, costs less than products of their own."""


def joins(modules: Sequence[nn.Module], x: Tensor, rows: int = ROWS) -> bool:
    """Whether `joined` pays: several maps, many rows, on a GPU. On a CPU a product has no cost beside its arithmetic."""
    return len(modules) > 1 and x.is_cuda and x.shape[:-1].numel() >= rows


def joined(modules: Sequence[nn.Linear], x: Tensor) -> list[Tensor]:
    """`[module(x), ...]` of maps without bias, by one product; what it returns are views of one tensor.

    Args:
        modules: of one dtype, K inputs each. x: (..., K).
    """
    weight = torch.cat([module.weight for module in modules])
    return list(F.linear(x, weight).split([module.out_features for module in modules], -1))
