"""Several linear maps of one input as one product: x is read once, its gradient is written once. And one of an odd width."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elman_core.kernels.runtime import autocast_dtype

ROWS = 4096
"""Rows of x from which on a copy of the weights, one behind the other or with rows of zeros, costs less than what it spares."""

ALIGN = 8
THIN = 128
"""Columns of a gradient up to which its copy costs less than a product of its own, which reads x and the sum so far again."""


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
        modules: of one dtype, K inputs each. x: (..., K).
    """
    weights: list[Tensor] = []  # each followed by rows of zeros, or by none
    biases: list[Tensor] = []
    for module in modules:
        # As autocast will have it, before it is copied: half as much to copy, there and back.
        weight = module.weight.to(autocast_dtype(module.weight))
        weights += [weight, weight.new_zeros(-module.out_features % ALIGN, x.shape[-1])]
        bias = weight.new_zeros(module.out_features) if module.bias is None else module.bias.to(weight.dtype)
        biases += [bias, weight.new_zeros(-module.out_features % ALIGN)]
    biased = any(module.bias is not None for module in modules)
    whole, sizes = torch.cat(weights), [len(each) for each in weights]
    given = x.to(whole.dtype), whole, torch.cat(biases) if biased else None
    if torch.compiler.is_compiling():
        return list(F.linear(*given).split(sizes, -1)[::2])
    return list(_Product.apply(*given, sizes)[::2])


class _Product(torch.autograd.Function):
    """`F.linear(x, weight, bias).split(sizes, -1)`, whose gradients are read where they lie: those side by side, as a kernel
    may leave them, by one product, others by products of their own. Only thin ones are copied behind each other."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, sizes: list[int]) -> tuple[Tensor, ...]:
        return F.linear(x, weight, bias).split(sizes, -1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:  # noqa: ARG004
        x, weight, _, ctx.sizes = inputs
        ctx.save_for_backward(x, weight)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows, (for_x, for_weight, for_bias, _) = x.flatten(0, -2), ctx.needs_input_grad
        dx, dweight, dbias = None, [], []
        groups = list(_groups(grads, ctx.sizes, x))
        for group, part in zip(groups, weight.split([group.shape[-1] for group in groups]), strict=True):
            d = group.flatten(0, -2)
            if for_x:
                dx = d.mm(part) if dx is None else dx.addmm_(d, part)
            dweight += [d.t().mm(rows)] if for_weight else []
            dbias += [d.sum(0)] if for_bias else []
        return (
            None if dx is None else dx.view(x.shape), torch.cat(dweight) if dweight else None,
            torch.cat(dbias) if dbias else None, None,
        )  # fmt: skip


def _groups(grads: Sequence[Tensor | None], sizes: Sequence[int], like: Tensor) -> Iterator[Tensor]:
    """The gradients in their order: those side by side as one tensor, neighbours that are thin or begin anywhere as a copy."""
    parts = [like.new_zeros(*like.shape[:-1], n) if g is None else g for g, n in zip(grads, sizes, strict=True) if n]
    copied: list[Tensor] = []
    while parts:
        count = max((i for i in range(2, len(parts) + 1) if side_by_side(parts[:i]) is not None), default=1)
        whole = parts[0] if count == 1 else side_by_side(parts[:count])
        parts = parts[count:]
        assert whole is not None
        keep = whole.shape[-1] > THIN and whole.stride(-2) % ALIGN == 0
        copied += [] if keep else [whole]
        if copied and (keep or not parts):
            yield torch.cat(copied, -1)
            copied = []
        if keep:
            yield whole


def side_by_side(parts: Sequence[Tensor]) -> Tensor | None:
    """The tensor of which `parts` are all columns in their order, or None."""
    first = parts[0]
    at = first.storage_offset()
    for part in parts:
        if part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
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
