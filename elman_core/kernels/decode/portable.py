"""The steps of decoding in plain PyTorch: the truth for their kernels, and what runs where a draw has none. Shapes as in op.py.

They compute in float32 (float64 for float64).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from elman_core.kernels.runtime import compute_dtype


def linears(x_BK: Tensor, weights: Sequence[Tensor], bias_N: Tensor | None, activated: int) -> list[Tensor]:
    wide = compute_dtype(x_BK)
    x = x_BK.to(wide)
    bias = None if bias_N is None else bias_N.to(wide)
    first, *others = weights
    y_BN = F.linear(x, first.to(wide), bias).to(x_BK.dtype)
    silu = F.silu(y_BN[:, :activated].to(wide)).to(x_BK.dtype)
    return [torch.cat((silu, y_BN[:, activated:]), 1), *(F.linear(x, w.to(wide)).to(x_BK.dtype) for w in others)]


def norm(x_BD: Tensor, residual_BD: Tensor | None, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = x_BD.to(compute_dtype(x_BD))
    stream_BD = wide if residual_BD is None else wide + residual_BD
    scale_B1 = (stream_BD.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (stream_BD * scale_B1 * weight_D.to(stream_BD.dtype)).to(x_BD.dtype), stream_BD


def kept_scores(
    logits_BV: Tensor, seen_BV: Tensor | None, *, penalty: float, temperature: float, top_k: int, top_p: float
) -> Tensor:
    """Scores after penalty, temperature, top-k and top-p, -inf for classes not to be drawn; float64 for float64, else float32.

    Args:
        seen_BV: bool: classes that have occurred in each row; None without a penalty. temperature: 0 keeps the scores.
        top_k: 0 for all. top_p: 1 for all.
    """
    scores_BV = logits_BV if logits_BV.dtype == torch.float64 else logits_BV.float()
    if penalty != 1.0 and seen_BV is not None:
        punished_BV = torch.where(scores_BV < 0, scores_BV * penalty, scores_BV / penalty)
        scores_BV = torch.where(seen_BV, punished_BV, scores_BV)
    if temperature == 0:
        return scores_BV
    scores_BV = scores_BV / temperature
    if 0 < top_k < scores_BV.shape[-1]:
        least_B1 = scores_BV.topk(top_k, dim=-1).values[:, -1:]
        scores_BV = scores_BV.masked_fill(scores_BV < least_B1, -torch.inf)
    if top_p < 1:
        ordered_BV, order_BV = scores_BV.sort(dim=-1, stable=True)
        drop_BV = ordered_BV.softmax(-1).cumsum(-1) <= 1 - top_p
        drop_BV[:, -1] = False  # the most likely always stays
        scores_BV = scores_BV.masked_fill(drop_BV.scatter(1, order_BV, drop_BV), -torch.inf)
    return scores_BV


def race(scores_BV: Tensor, waits_BV: Tensor | None) -> Tensor:
    """The values whose largest is the drawn class: a race of exponentials, as torch.multinomial draws one sample, but without
    reading values on the host. For temperature 0, without `waits_BV`, they are the scores."""
    return scores_BV if waits_BV is None else scores_BV.softmax(-1) / waits_BV


def draw(
    logits_BV: Tensor, waits_BV: Tensor | None, seen_BV: Tensor, drawn_B: Tensor, shown_B: Tensor, **how: Any
) -> None:
    drawn_B.copy_(race(kept_scores(logits_BV, seen_BV, **how), waits_BV).argmax(-1))
    if how["penalty"] != 1:
        seen_BV.scatter_(1, drawn_B[:, None], True)
    shown_B.copy_(torch.where(logits_BV.isfinite().all(-1), drawn_B, -1))
