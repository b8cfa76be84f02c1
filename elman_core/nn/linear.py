"""Linear maps. For few rows without gradients, as in decoding, they have their own kernel, if it runs here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import torch.nn.functional as F
from torch import Tensor, nn

from elman_core.kernels.decode import op as decode
from elman_core.kernels.runtime import invariant_linear

from .functional import time_major
from .joined import ALIGN, joined, joins, many_rows, padded


def is_bare(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether `module` is a plain `torch.nn.Linear`: no adapter or quantiser in its place or its weight's, and no hook, which
    must not be skipped."""
    return type(module) is nn.Linear and type(module.weight) in (nn.Parameter, Tensor) and is_unhooked(module)


def is_unhooked(module: nn.Module) -> bool:
    """Whether nothing happens when `module` is called but its own `forward`."""
    return (
        not module._forward_hooks
        and not module._forward_pre_hooks
        and not module._backward_hooks
        and not module._backward_pre_hooks
        and "forward" not in module.__dict__
    )


def columns(module: nn.Module, x: Tensor, width: int, silu: bool = False, time: int = 1) -> tuple[Tensor, ...]:
    """`module(x)` in parts of `width` columns, the first passed through SiLU if asked.

    Args:
        module: an `nn.Linear`, or an adapter's replacement. x: (..., K). time: as for `linear`.
    """
    if is_bare(module) and decode.takes(x, module.weight, bias=module.bias):
        return decode.linear(x, module.weight, module.bias, activated=width if silu else 0).split(width, -1)
    first, *others = _plain(module, x, time).split(width, -1)
    return (F.silu(first) if silu else first, *others)


def linears(modules: Sequence[nn.Module], x: Tensor, time: int = 1) -> list[Tensor]:
    """`[module(x), ...]`; one product for many rows; for few rows, one launch of up to five if no module has a bias, otherwise
    one launch each."""
    bare = [module for module in modules if is_bare(module)]
    if len(bare) == len(modules):
        weights = [module.weight for module in bare]
        most = decode.MOST_MAPS + 1
        parts = [weights[at : at + most] for at in range(0, len(weights), most)]
        if all(module.bias is None for module in bare) and all(decode.takes(x, *part) for part in parts):
            return [y for part in parts for y in decode.linears(x, part)]
        if joins(bare, x):
            return joined(bare, x)
    return [linear(module, x, time) for module in modules]


def linear(module: nn.Module, x: Tensor, time: int = 1) -> Tensor:
    """`module(x)`, through the kernel for few rows if it runs. `time`: the axis of time; if it is 0, an adapter chosen for each
    row of a batch still sees the batch first."""
    if is_bare(module) and decode.takes(x, module.weight, bias=module.bias):
        return decode.linear(x, module.weight, module.bias)
    return _plain(module, x, time)


def _plain(module: nn.Module, x: Tensor, time: int) -> Tensor:
    if time == 0 and module._forward_pre_hooks:  # by which PEFT passes the names of adapters
        return time_major(module(x.transpose(0, 1)))
    return invariant_linear(x, module.weight, module.bias) if is_bare(module) else module(x)


def aligned(module: nn.Module, x: Tensor) -> Tensor:
    """`module(x)`, padded with columns of zeros to a multiple of 8 if unaligned rows would cost more.

    If rows of 16-bit numbers do not start at multiples of 16 bytes, products miss the fastest path of the tensor cores, and
    kernels cannot read the result in place in whole vectors (causal_conv1d refuses such rows).

    Args:
        module: a map without bias with N outputs, or an adapter's replacement, which is simply called. x: (..., K).

    Returns:
        (..., N), or (..., N rounded up to a multiple of 8).
    """
    if is_bare(module) and module.bias is None and module.out_features % ALIGN and many_rows(x):
        return padded(module.weight, x)
    return linear(module, x)
