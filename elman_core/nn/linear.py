"""Linear maps: of few rows without gradients, as decoding makes them, in a kernel of their own where there is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import torch.nn.functional as F
from torch import Tensor, nn

from elman_core.kernels.decode import op as decode

from .joined import ALIGN, joined, joins, many_rows, padded


def is_bare(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether `module` is `torch.nn.Linear` and nothing else: no adapter, no quantiser in its place or in its weight's, and no
    hook, which a call must not pass by."""
    return (
        type(module) is nn.Linear
        and type(module.weight) in (nn.Parameter, Tensor)
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and not module._backward_hooks
        and not module._backward_pre_hooks
        and "forward" not in module.__dict__
    )


def columns(module: nn.Module, x: Tensor, width: int, silu: bool = False) -> tuple[Tensor, ...]:
    """`module(x)` in parts of `width` columns, the first passed through SiLU if asked.

    Args:
        module: an `nn.Linear`, or what an adapter has put in its place. x: (..., K).
    """
    if is_bare(module) and decode.takes(x, module.weight, bias=module.bias):
        return decode.linear(x, module.weight, module.bias, activated=width if silu else 0).split(width, -1)
    first, *others = module(x).split(width, -1)
    return (F.silu(first) if silu else first, *others)


def linears(modules: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    """`[module(x), ...]`; as one product for many rows; for few, in one launch if none has a bias, else in one each."""
    bare = [module for module in modules if is_bare(module)]
    if len(bare) == len(modules):
        weights = [module.weight for module in bare]
        if all(module.bias is None for module in bare) and decode.takes(x, *weights):
            return decode.linears(x, weights)
        if joins(bare, x):
            return joined(bare, x)
    return [linear(module, x) for module in modules]


def linear(module: nn.Module, x: Tensor) -> Tensor:
    """`module(x)`, by the kernel for few rows where it runs."""
    if is_bare(module) and decode.takes(x, module.weight, bias=module.bias):
        return decode.linear(x, module.weight, module.bias)
    y: Tensor = module(x)
    return y


def aligned(module: nn.Module, x: Tensor) -> Tensor:
    """`module(x)`, with columns of zeros behind it up to a multiple of 8 where rows that begin at odd places would cost more.

    Rows of 16-bit numbers that do not begin at multiples of 16 bytes keep products off the tensor cores' best path, and kernels
    that read the result in place from whole vectors (causal_conv1d refuses them).

    Args:
        module: a map without bias of N outputs, or what an adapter has put in its place, which is called as it is. x: (..., K).

    Returns:
        (..., N), or (..., N rounded up to a multiple of 8).
    """
    if is_bare(module) and module.bias is None and module.out_features % ALIGN and many_rows(x):
        return padded(module.weight, x)
    return module(x)
