"""The gradient of W: products over all time steps and rows at once, after the loop."""

from __future__ import annotations

import torch
from torch import Tensor

LONGEST_SUM = 16384  # places (time steps times rows) of one float32 product


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
