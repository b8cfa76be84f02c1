"""Several linear maps of one input as one product: x is read once, its gradient is written once. And one of an odd width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elman_core.kernels.runtime import autocast_dtype

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
    """`[module(x), ...]` by one product; what it returns are views of one tensor.

    Each begins at a multiple of 8 columns, 16 bytes of 16-bit numbers, and rows lie so far apart: what kernels read in place.

    Args:
        modules: of one dtype, K inputs each, all with a bias or all without. x: (..., K).
    """
    weights: list[Tensor] = []  # each followed by rows of zeros, or by none
    biases: list[Tensor] = []
    for module in modules:
        # As autocast will have it, before it is copied: half as much to copy, there and back.
        weight = module.weight.to(autocast_dtype(module.weight))
        weights += [weight, weight.new_zeros(-module.out_features % ALIGN, x.shape[-1])]
        if module.bias is not None:
            biases += [module.bias.to(weight.dtype), weight.new_zeros(-module.out_features % ALIGN)]
    y = F.linear(x, torch.cat(weights), torch.cat(biases) if biases else None)
    sizes = [len(weight) for weight in weights]
    parts: Sequence[Tensor] = y.split(sizes, -1) if torch.compiler.is_compiling() else _Split.apply(y, sizes)
    return list(parts[::2])


class _Split(torch.autograd.Function):
    """`y.split(sizes, -1)`; gradients of the parts that lie side by side, as a kernel may leave them, are not copied."""

    @staticmethod
    def forward(y: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
        return y.split(sizes, -1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:  # noqa: ARG004
        y, ctx.sizes = inputs
        ctx.shape, ctx.options = y.shape[:-1], {"dtype": y.dtype, "device": y.device}
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None]:
        whole = side_by_side(grads, ctx.sizes)
        if whole is None:
            made = (
                torch.zeros(*ctx.shape, n, **ctx.options) if g is None else g
                for g, n in zip(grads, ctx.sizes, strict=True)
            )
            whole = torch.cat(list(made), -1)
        return whole, None


def side_by_side(parts: Sequence[Tensor | None], sizes: Sequence[int]) -> Tensor | None:
    """The tensor of which `parts`, `sizes` columns wide, are all columns in their order, or None. Empty parts do not count."""
    some = [part for part, size in zip(parts, sizes, strict=True) if size]
    first = some[0]
    if first is None:
        return None
    at = first.storage_offset()
    for part in some:
        if part is None or part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        if part.stride() != first.stride() or part.storage_offset() != at or part.dtype != first.dtype:
            return None
        at += part.shape[-1]
    if first.stride(-1) != 1 or (first.dim() > 1 and first.stride(-2) < at - first.storage_offset()):
        return None
    return first.as_strided((*first.shape[:-1], at - first.storage_offset()), first.stride())


def padded(weight: Tensor, x: Tensor) -> Tensor:
    """x Wᵀ for W (N, K) with rows of zeros behind it up to a multiple of 8."""
    return F.linear(x, F.pad(weight.to(autocast_dtype(weight)), (0, 0, 0, -len(weight) % ALIGN)))
