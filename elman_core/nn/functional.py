"""Functions without parameters, and the rules for dtypes that references and mixers share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from elman_core.kernels.dense.portable import block_product
from elman_core.kernels.matrix.portable import l2_normalize as l2_normalize
from elman_core.kernels.matrix.portable import mamba_decay as mamba_decay
from elman_core.kernels.runtime import compute_dtype, results, without_autocast

Function = TypeVar("Function", bound=Callable[..., tuple[Any, ...]])


def full_precision(function: Function) -> Function:
    """Decorator of references: autocast is off inside, and all floating tensors arrive in their common `compute_dtype`.

    So the body contains only the equation, whatever dtype the model computes in. The function returns a tuple whose first item
    comes back in the dtype of the first argument; the others (states) stay in the dtype of the computation.
    """

    @functools.wraps(function)
    def wrapped(first: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        dtype = compute_dtype(first, *(a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)))

        def up(value: Any) -> Any:
            return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

        with without_autocast(first):
            result = function(up(first), *(up(a) for a in args), **{k: up(v) for k, v in kwargs.items()})
        return (result[0].to(first.dtype), *result[1:])

    return cast(Function, wrapped)


def dense_reference(step: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Decorator: the reference of a dense recurrence from its step `(a, h, *extras) -> (new h, y)`, a = W h + u.

    Returns:
        `reference(u_TBd, *extras_TBd, w_dd, h0_Bd, mask_TB, starts_TB) -> (y_TBd, h_T)`, all by position, the last two None or
        left out; a loop over time in float32 or float64. Where the mask is False, the state does not change and y is
        undefined; where a document starts, h is first set to 0. W of shape (n, d / n, d / n) contains the n blocks of a
        block-diagonal matrix.
    """
    count = len(inspect.signature(step).parameters) - 2

    @functools.wraps(step)
    def reference(u_TBd: Tensor, *rest: Tensor | None) -> tuple[Tensor, Tensor]:
        extras = rest[:count]
        w_dd, h_Bd, mask_TB, starts_TB = (*rest[count:], None, None)[:4]
        assert w_dd is not None and h_Bd is not None  # noqa: PT018
        outputs = []
        for u_Bd, mask_B, start_B, *extras_Bd in each_step(u_TBd, mask_TB, starts_TB, *extras):
            h_Bd = restart(h_Bd, start_B)
            made = step(u_Bd + block_product(h_Bd, w_dd), h_Bd, *extras_Bd)
            new_Bd, y_Bd = results(step, made, 2, "the new state and y")
            h_Bd = hold(new_Bd, h_Bd, mask_B)
            outputs.append(y_Bd)
        return torch.stack(outputs), h_Bd

    return full_precision(reference)


def matrix_reference(step: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Decorator: the reference of a matrix-state recurrence from its step `(S, k, [rows,] v, *others, **options) -> new S`.

    In the step, S is (B, H, N, V) with keys as rows, and the other inputs broadcast to it: keys (B, H, N, 1), lines
    (B, H, 1, V), scalars (B, H, 1, 1), params (H, 1, V). So Sᵀ k is `k.mT @ S`. Keys are k and all arguments between k and v.

    Returns:
        `reference(q, k, …, v, *others, state, mask, starts, **options) -> (o, S_T)`, o_t = S_tᵀ q_t, a loop over time in
        float32 or float64. Keys are (B, T, H, N), lines (B, T, H, V), scalars (B, T, H) or None, params (H, V). All of these
        go by position; of the last three each may be None, and the last may be left out. Where the mask is False, the state
        does not change and o is undefined; where a document starts, S is first set to 0.
    """
    names = [n for n, p in inspect.signature(step).parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    keys, count = names.index("v") - 1, len(names) - 1

    @functools.wraps(step)
    def reference(q_BTHN: Tensor, *given: Any, **options: Any) -> tuple[Tensor, Tensor]:
        inputs = list(given[:count])
        s, mask_BT, starts_BT = (*given[count:], None, None, None)[:3]
        for i, x in enumerate(inputs):
            if x is not None and x.dim() > 2:  # beside S, and time first
                if i < keys:
                    x = x[..., None]
                else:
                    x = x[..., None, :] if x.dim() == 4 else x[..., None, None]
                inputs[i] = x.transpose(0, 1)
            elif x is not None:
                inputs[i] = x[:, None].expand(q_BTHN.shape[1], *x[:, None].shape)
        if s is None:
            s = q_BTHN.new_zeros(*q_BTHN[:, 0].shape, given[keys].shape[-1])
        outputs = []
        flags = (None if x is None else x.transpose(0, 1) for x in (mask_BT, starts_BT))
        for q_BHN, mask_B, start_B, *at in each_step(q_BTHN.transpose(0, 1), *flags, *inputs):
            s = restart(s, start_B)
            s = hold(step(s, *at, **options), s, mask_B)
            outputs.append((q_BHN[..., None, :] @ s)[..., 0, :])
        return torch.stack(outputs, 1), s

    return full_precision(reference)


def gate(logit: Tensor) -> tuple[Tensor, Tensor]:
    """sigmoid(logit) and 1 - sigmoid(logit), accurate with their derivatives even for a gate that is nearly closed or open."""
    return F.logsigmoid(logit).exp(), F.logsigmoid(-logit).exp()


def self_gate(h: Tensor) -> Tensor:
    """g(h) = h silu(h) = h² sigmoid(h), never negative. g'(h) = h sigmoid(h) (2 + h (1 - sigmoid(h)))."""
    return h * F.silu(h)


def time_major(x: Tensor) -> Tensor:
    """(B, T, …) as contiguous (T, B, …). It copies only where B and T are both more than 1."""
    return x.transpose(0, 1).contiguous()


def each_step(x: Tensor, *others: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """The time steps of several tensors (T, …) side by side, for the loop of a reference; None stays None at every step."""
    columns = ([None] * len(x) if other is None else other.unbind(0) for other in others)
    return zip(x.unbind(0), *columns, strict=True)


def restart(state: Tensor, start: Tensor | None, initial: Tensor | float = 0.0) -> Tensor:
    """`state` (B, …) with the rows where `start` (B,) is True set to `initial`, the state before the first step."""
    return state if start is None else torch.where(_rows(start, state), initial, state)


def hold(new: Tensor, old: Tensor, mask: Tensor | None) -> Tensor:
    """`new` (B, …), or `old` in the rows where `mask` (B,) is False."""
    return new if mask is None else torch.where(_rows(mask, new), new, old)


def _rows(flag: Tensor, like: Tensor) -> Tensor:
    return flag.reshape(-1, *[1] * (like.dim() - 1))
