"""The gradient of W: products over all time steps and rows at once, after the loop."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LONGEST_SUM = 16384  # places (time steps times rows) of one float32 product


def factor_gradients(
    da: Tensor, before: Tensor, factors: Sequence[Tensor], wanted: Sequence[bool]
) -> list[Tensor | None]:
    """dL/dW_i of a = W_1 ... W_n h over all places at once: one product each, two more for each inner size.

    Args:
        da, before: (places, d): gradients of a, and h.
    """
    after = [before]  # what each factor is given, the last one's first
    for w in reversed(factors[1:]):
        after.append(after[-1] @ w.to(before.dtype).t())
    found: list[Tensor | None] = []
    for i, w in enumerate(factors):
        found.append(product(da.t(), after[len(factors) - 1 - i], w.dtype) if wanted[i] else None)
        if i + 1 < len(factors):
            da = da @ w.to(da.dtype)
    return found


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b in `dtype`; 16-bit factors are accumulated and returned in float32 where that is asked for.

    A long sum in float32 is made of shorter ones: over 131,072 places one after another rounding alone comes to 7e-6 of it.
    """
    if a.is_cuda and dtype == torch.float32 and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32)
    places = b.shape[0]
    if places <= LONGEST_SUM or a.dtype != torch.float32:
        return (a @ b).to(dtype)
    total = a[:, :LONGEST_SUM] @ b[:LONGEST_SUM]
    for first in range(LONGEST_SUM, places, LONGEST_SUM):
        part = slice(first, first + LONGEST_SUM)
        total = torch.addmm(total, a[:, part], b[part])
    return total.to(dtype)
