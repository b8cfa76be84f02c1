"""Weights in int8: symmetric quantisation of a matrix to 255 values in each row, with a scale for each row.

A model is rounded once and from then on is another model, in float32, whatever computes it; a program finds such matrices and
reads a quarter of their bytes. So a text does not depend on what writes it, and its bits per byte are the rounded model's.

Shapes: N rows (outputs of a product), K columns.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from elman_core.registry.errors import ConfigError

LEAST = 32
"""Rows and columns of the smallest matrix in int8: smaller ones take no time."""

_MOST = 127


def round_to_int8(model: nn.Module) -> None:
    """Round the matrices of a float32 model in place, each row to 255 values: those with at least 32 rows and columns.

    Raises:
        ConfigError: a matrix is not float32, which could not hold these values.
    """
    matrices = [p for p in model.parameters() if _fits(p)]
    if odd := next((p.dtype for p in matrices if p.dtype != torch.float32), None):
        raise ConfigError(f"only a float32 model is rounded to int8, not {str(odd)[6:]}: load it with dtype=float32")
    with torch.no_grad():
        for w in matrices:
            whole, scale = _quantised(w)
            w.copy_(whole * scale)


def in_int8(w: Tensor) -> tuple[Tensor, Tensor] | None:
    """(int8 (N, K), float32 scales (N,)) of a matrix that has been rounded, and perhaps scaled since; None of any other."""
    if not _fits(w) or w.dtype != torch.float32 or not (w.is_contiguous() or w.mT.is_contiguous()):
        return None
    w = w if w.is_contiguous() else w.mT
    for part in (w[:1], w):  # one row tells most of the others
        whole, scale = _quantised(part)
        if not (part / scale - whole).abs().max() < 1e-3:
            return None
    return whole.to(torch.int8), scale[:, 0].contiguous()


def _fits(w: Tensor) -> bool:
    return w.dim() == 2 and min(w.shape) >= LEAST


def _quantised(w: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers from -127 to 127 (N, K) and scales (N, 1) with w near their product."""
    scale = (w.abs().amax(1, keepdim=True) / _MOST).clamp_(min=torch.finfo(w.dtype).tiny)
    return (w / scale).round_(), scale
