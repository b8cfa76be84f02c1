"""Several linear maps of one input as one product: x is read once, its gradient written once. Also single maps of odd width."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elman_core.kernels.runtime import autocast_dtype, transformed, without_autocast

ROWS = 4096
"""The number of rows of x from which concatenating the weights, or padding them with rows of zeros, pays off."""

ALIGN = 8
THIN = 128
"""Gradients of at most this many columns are copied; a separate product would cost more, since it reads x and the sum again."""


def joins(modules: Sequence[nn.Module], x: Tensor) -> bool:
    """Whether `joined` pays off: several maps, many rows, on a GPU. On a CPU, a product costs only its arithmetic."""
    return len(modules) > 1 and many_rows(x)


def many_rows(x: Tensor) -> bool:
    """Whether x is on a GPU and has so many rows that copying the weights is cheap compared with their product."""
    return x.is_cuda and x.numel() >= ROWS * x.shape[-1]


def joined(modules: Sequence[nn.Linear], x: Tensor) -> list[Tensor]:
    """`[module(x), ...]` by one product, for modules of one dtype; the results are views of one tensor.

    Views and their rows start at multiples of 8 columns (16 bytes in 16-bit dtypes), so kernels can read them in place.
    """
    weights, biases = list[Tensor](), list[Tensor]()  # each followed by rows of zeros, or by none
    for module in modules:
        # Cast as autocast would, but before copying: half as many bytes, forward and backward.
        weight = module.weight.to(autocast_dtype(module.weight))
        weights += [weight, weight.new_zeros(-module.out_features % ALIGN, x.shape[-1])]
        bias = weight.new_zeros(module.out_features) if module.bias is None else module.bias.to(weight.dtype)
        biases += [bias, weight.new_zeros(-module.out_features % ALIGN)]
    biased = any(module.bias is not None for module in modules)
    whole, sizes = torch.cat(weights), [len(each) for each in weights]
    given = x.to(whole.dtype), whole, torch.cat(biases) if biased else None
    if torch.compiler.is_compiling() or transformed(vmap=True):
        return list(F.linear(*given).split(sizes, -1)[::2])
    return list(_Product.apply(*given, sizes)[::2])


class _Product(torch.autograd.Function):
    """`F.linear(x, weight, bias).split(sizes, -1)`, whose gradients are read in place: adjacent ones, as kernels may
    produce them, by one product, others by separate products. Only narrow ones are copied together."""

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
        rows = x.flatten(0, -2)
        for_x, for_weight, for_bias, _ = ctx.needs_input_grad
        dx, dweight, dbias = None, [], []
        groups = list(_groups(grads, ctx.sizes, x))
        with without_autocast(x):  # `backward()` may be called inside it
            for group, part in zip(groups, weight.split([group.shape[-1] for group in groups]), strict=True):
                d = group.flatten(0, -2)
                if for_x:
                    dx = d.mm(part) if dx is None else dx.addmm_(d, part)
                if for_weight:
                    dweight.append(d.t().mm(rows))
                if for_bias:
                    dbias.append(d.sum(0))
        return (
            None if dx is None else dx.view(x.shape), torch.cat(dweight) if dweight else None,
            torch.cat(dbias) if dbias else None, None,
        )  # fmt: skip


def _groups(grads: Sequence[Tensor | None], sizes: Sequence[int], like: Tensor) -> Iterator[Tensor]:
    """The gradients in order: adjacent ones as one tensor; narrow neighbours, or those at unaligned places, as a copy."""
    parts = [like.new_zeros(*like.shape[:-1], n) if g is None else g for g, n in zip(grads, sizes, strict=True) if n]
    copied: list[Tensor] = []
    while parts:
        count = max((i for i in range(2, len(parts) + 1) if side_by_side(parts[:i]) is not None), default=1)
        whole = parts[0] if count == 1 else side_by_side(parts[:count])
        parts = parts[count:]
        assert whole is not None
        keep = whole.shape[-1] > THIN and whole.stride(-2) % ALIGN == 0
        if not keep:
            copied.append(whole)
        if copied and (keep or not parts):
            yield torch.cat(copied, -1)
            copied = []
        if keep:
            yield whole


def side_by_side(parts: Sequence[Tensor]) -> Tensor | None:
    """The tensor whose columns are exactly `parts`, in order; None if there is none."""
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
    """x Wᵀ for W (N, K), padded with rows of zeros to a multiple of 8."""
    return F.linear(x, F.pad(weight.to(autocast_dtype(weight)), (0, 0, 0, -len(weight) % ALIGN)))
