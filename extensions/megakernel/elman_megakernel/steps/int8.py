"""Which matrices of a program are in int8. N rows, K columns."""

from __future__ import annotations

import torch
from torch import Tensor

from elman_core.extension import fits_int8, quantised


def in_int8(w: Tensor) -> tuple[Tensor, Tensor] | None:
    """(int8 (N, K), float32 scales (N,)) of a matrix that has been rounded, and perhaps scaled since; None of any other."""
    if not fits_int8(w) or w.dtype != torch.float32 or not (w.is_contiguous() or w.mT.is_contiguous()):
        return None
    w = w if w.is_contiguous() else w.mT
    for part in (w[:1], w):  # one row tells most of the others
        whole, scale = quantised(part)
        if not (part / scale - whole).abs().max() < 1e-3:
            return None
    return whole.to(torch.int8), scale[:, 0].contiguous()
