"""A matrix-state recurrence in plain PyTorch: the maps of its inputs, then the reference. Shapes as in op.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from elman_core.kernels.runtime import compute_dtype, without_autocast

from .modules import Maps, MatrixCell

_NORM_EPS = 1e-12


def recurrence(
    reference: Callable[..., tuple[Tensor, Tensor]], cell: MatrixCell, maps: Maps, tensors: Mapping[str, Tensor | None],
    sizes: Sequence[int], rest: tuple[Tensor | None, ...], options: Mapping[str, bool],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The recurrence of a `MatrixKernel` by `reference`, in float32 (float64 beside float64), also under autocast.

    Args:
        tensors: the inputs by name, q and k first; packed if k is None. sizes: (H, N). rest: S_0, mask, starts, A_log, dt_bias.

    Returns:
        o (B, T, H, V) in the dtype of q, and S_T as the reference returns it.
    """
    given, (heads, rows), (state, mask, starts, *mamba) = tensors["q"], sizes, rest
    assert given is not None
    dtype = compute_dtype(*tensors.values(), *mamba)
    with without_autocast(given):
        made: dict[str, Any] = {n: None if x is None else x.to(dtype) for n, x in tensors.items()}
        if made["k"] is None:
            names, keys = ("q", "k", *cell.packed), [heads * rows] * (2 + len(cell.vectors))
            values = (given.shape[2] - sum(keys)) // len(cell.lines)
            parts = made["q"].split([*keys, *[values] * len(cell.lines)], -1)
            made |= {n: x.unflatten(-1, (heads, -1)) for n, x in zip(names, parts, strict=True)}
        for name in maps.silu:
            made[name] = F.silu(made[name])
        for name in maps.normalised:
            made[name] = made[name] * torch.rsqrt(made[name].square().sum(-1, keepdim=True) + _NORM_EPS)
        made |= {n: made[n].expand(-1, -1, heads, -1) for n in cell.shared}
        for i, name in enumerate(cell.scalars):
            if made[name] is not None and maps.kind(i) == "sigmoid":
                made[name] = torch.sigmoid(made[name])
            elif made[name] is not None and maps.kind(i) == "mamba":
                a_log, dt_bias = (x.to(dtype) for x in mamba if x is not None)
                made[name] = torch.exp(-a_log.exp() * F.softplus(made[name] + dt_bias))
        o_BTHV, last = reference(*made.values(), state, mask, starts, **options)
    return o_BTHV.to(given.dtype), last
