"""The common part of the chunked forms of Mamba-2 and Gated DeltaNet: chunks of time, and the decays inside one.

B batch, T time, H heads, L steps of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def chunks(size: int, x_BT: Tensor, *others: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Chunks of `size` steps, the last one shorter, of several tensors (B, T, …) side by side; None stays None."""
    count = -(-x_BT.shape[1] // size)
    return zip(*([None] * count if x is None else x.split(size, 1) for x in (x_BT, *others)), strict=True)


def decays(log_BLH: Tensor, starts_BL: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The remaining fraction of a state: products of decays over a part of a chunk; exactly 0 if a document begins there.

    Args:
        log_BLH: logarithm of the decay of each step, at most 0. starts_BL: bool, True where a document begins.

    Returns:
        (between (B, H, L, L), after step j up to and including step i, and 0 for j > i; since (B, H, L), from before the
        chunk up to and including step i; to_end (B, H, L), after step j to the end of the chunk).
    """
    log_BHM = F.pad(log_BLH.transpose(1, 2), (1, 0))  # M = L + 1: before the chunk, and after each step
    apart = torch.ones(2 * log_BHM.shape[-1:], dtype=torch.bool, device=log_BLH.device).triu(1)
    if starts_BL is not None:
        document_B1M = F.pad(starts_BL.cumsum(1), (1, 0))[:, None]
        apart = apart | (document_B1M[..., :, None] != document_B1M[..., None, :])
    # Each entry is a sum of its own: of differences between sums, rounding would leak a gradient into an earlier document.
    sum_BHMM = log_BHM[..., None].expand(*log_BHM.shape, log_BHM.shape[-1]).tril(-1).cumsum(-2)
    left_BHMM = sum_BHMM.masked_fill(apart, -torch.inf).exp()
    return left_BHMM[..., 1:, 1:], left_BHMM[..., 1:, 0], left_BHMM[..., -1, 1:]
