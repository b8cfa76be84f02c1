"""Draw a class from logits in plain PyTorch: the truth for `decode.draw`, and its replacement where it does not run.

Shapes: B rows, V classes.
"""

from __future__ import annotations

import torch
from torch import Tensor


def kept_scores(
    logits_BV: Tensor,
    seen_BV: Tensor | None,
    *,
    penalty: float,
    temperature: float,
    top_k: int,
    top_p: float,
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
