"""The recurrence of a matrix-state cell in plain PyTorch: its reference, behind the maps of its inputs. Shapes as in op.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from elman_core.kernels.runtime import compute_dtype, spare_rows, with_spare, without_autocast

from .spec import Maps, MatrixCell


def l2_normalize(x: Tensor, eps: float = 1e-12) -> Tensor:
    """x (|x|² + eps)^(-1/2) over the last dimension, in float32 or float64, returned in the dtype of x.

    eps is inside the root: no singularity at 0, and the adjoint dx = rho (dy - y (y·dy)) is exact.
    """
    full = x.to(compute_dtype(x))
    return (full * torch.rsqrt(full.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def mamba_decay(a: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
    """exp(-exp(a_log) softplus(a + dt_bias)), in (0, 1]: the decay of Mamba-2, one for each head (last dimension).

    Computed and returned in float32 (float64 for float64), because a decay near 1 needs every digit.
    """
    dtype = compute_dtype(a, a_log, dt_bias)
    with without_autocast(a):  # -softplus(x) = logsigmoid(-x), whose bits on a CPU do not depend on the number of rows
        return torch.exp(torch.exp(a_log.to(dtype)) * F.logsigmoid(-(a.to(dtype) + dt_bias.to(dtype))))


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
    given = next(iter(tensors.values()))
    assert given is not None
    heads, rows = sizes
    batch = given.shape[0]
    made: dict[str, Any] = dict(tensors)
    state, mask, starts = (made.pop(name) for name in ("S0", "mask", "starts"))
    dtype = compute_dtype(*made.values())
    if batch == heads == 1 and spare_rows(1, given):  # BLAS sums one product otherwise than each of several
        timed = [name for name, x in made.items() if x is not None and name not in (*cell.params, "A_log", "dt_bias")]
        made |= zip(timed, with_spare(1, 0, *(made[name] for name in timed)), strict=True)
        state, mask, starts = with_spare(1, 0, state, mask, starts)
    with without_autocast(given):
        made = {name: None if x is None else x.to(dtype) for name, x in made.items()}
        if "packed" in made:
            keys = [heads * rows] * (2 + len(cell.vectors))
            values = (given.shape[2] - sum(keys)) // len(cell.lines)
            parts = made.pop("packed").split([*keys, *[values] * len(cell.lines)], -1)
            made |= {n: x.unflatten(-1, (heads, -1)) for n, x in zip(("q", "k", *cell.packed), parts, strict=True)}
        for name in maps.silu:
            made[name] = F.silu(made[name])
        for name in maps.normalised:
            made[name] = l2_normalize(made[name])
        made |= {n: made[n].expand(-1, -1, heads, -1) for n in cell.shared}
        for i, name in enumerate(cell.scalars):
            if made[name] is not None and maps.kind(i) == "sigmoid":
                made[name] = F.logsigmoid(made[name]).exp()  # its bits on a CPU do not depend on the number of rows
            elif made[name] is not None and maps.kind(i) == "mamba":
                made[name] = mamba_decay(made[name], made["A_log"], made["dt_bias"])
        inputs = (made[n] for n in ("q", "k", *cell.names))
        o_BTHV, last = (reference or cell.reference)(*inputs, state, mask, starts, **options)
    return o_BTHV[:batch].to(given.dtype), last[:batch]
