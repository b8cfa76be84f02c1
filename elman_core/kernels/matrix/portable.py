"""The recurrence of a matrix-state cell in plain PyTorch: its reference, behind the maps of its inputs. Shapes as in op.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from elman_core.kernels.runtime import compute_dtype, without_autocast

from .spec import Maps, MatrixCell

_NORM_EPS = 1e-12


def recurrence(
    cell: MatrixCell,
    maps: Maps,
    tensors: Mapping[str, Tensor | None],
    sizes: Sequence[int],
    options: Mapping[str, bool],
    reference: Callable[..., tuple[Tensor, Tensor]] | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence in float32 (float64 beside float64), also under autocast.

    Args:
        tensors: the inputs of a call by name, in its order. sizes: (H, N). reference: instead of the cell's.

    Returns:
        o (B, T, H, V) in the dtype of the first input, and S_T as the reference returns it.
    """
    given, (heads, rows) = next(iter(tensors.values())), sizes
    assert given is not None
    made: dict[str, Any] = dict(tensors)
    state, mask, starts = (made.pop(name) for name in ("S0", "mask", "starts"))
    dtype = compute_dtype(*made.values())
    with without_autocast(given):
        made = {name: None if x is None else x.to(dtype) for name, x in made.items()}
        if "packed" in made:
            names, keys = ("q", "k", *cell.packed), [heads * rows] * (2 + len(cell.vectors))
            values = (given.shape[2] - sum(keys)) // len(cell.lines)
            parts = made.pop("packed").split([*keys, *[values] * len(cell.lines)], -1)
            made |= {n: x.unflatten(-1, (heads, -1)) for n, x in zip(names, parts, strict=True)}
        for name in maps.silu:
            made[name] = F.silu(made[name])
        for name in maps.normalised:
            made[name] = made[name] * torch.rsqrt(made[name].square().sum(-1, keepdim=True) + _NORM_EPS)
        made |= {n: made[n].expand(-1, -1, heads, -1) for n in cell.shared}
        for i, name in enumerate(cell.scalars):
            if made[name] is not None and maps.kind(i) == "sigmoid":
                made[name] = F.logsigmoid(made[name]).exp()  # its bits on a CPU do not depend on the number of rows
            elif made[name] is not None and maps.kind(i) == "mamba":
                made[name] = torch.exp(made["A_log"].exp() * F.logsigmoid(-(made[name] + made["dt_bias"])))
        inputs = (made[n] for n in ("q", "k", *cell.names))
        o_BTHV, last = (reference or cell.reference)(*inputs, state, mask, starts, **options)
    return o_BTHV.to(given.dtype), last
