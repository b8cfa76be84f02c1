"""Linear maps: of few rows without gradients, as decoding makes them, in a kernel of their own where there is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

from torch import Tensor, nn

from elman_core.kernels import few_rows

from .joined import joined, joins


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


def few_rows_linear(module: nn.Module, x: Tensor, activated: int = 0) -> Tensor | None:
    """`module(x)`, its first `activated` columns passed through SiLU, in one launch; None where another way must be taken.

    Args:
        module: an `nn.Linear`, or what an adapter has put in its place. x: (..., K).
    """
    if not is_bare(module) or not few_rows.takes(x, module.weight, bias=module.bias):
        return None
    return few_rows.linear(x, module.weight, module.bias, activated)


def linears(modules: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    """`[module(x), ...]`; maps without bias in one launch for few rows, and as one product for many."""
    bare = [module for module in modules if is_bare(module)]
    if len(bare) == len(modules) and all(module.bias is None for module in bare):
        weights = [module.weight for module in bare]
        if few_rows.takes(x, *weights):
            return few_rows.linears(x, weights)
        if joins(bare, x):
            return joined(bare, x)
    return [module(x) for module in modules]


def linear(module: nn.Module, x: Tensor) -> Tensor:
    """`module(x)`, by the kernel for few rows where it runs."""
    y = few_rows_linear(module, x)
    return module(x) if y is None else y
