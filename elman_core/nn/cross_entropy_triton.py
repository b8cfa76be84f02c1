"""The Triton kernel of `cross_entropy.py`: logits are read once and overwritten by their gradient. Imported on a GPU only.

Shapes: N targets, V classes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 4096
"""Logits of a program: as many rows as that makes. A longer row is read twice, in pieces."""

PIECE = 8192


@triton.jit
def _overwrite(  # type: ignore[no-untyped-def]
    logits, targets, losses, rows, classes, IGNORED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    here = row < rows
    inside = here[:, None] & (column[None, :] < classes)
    at = logits + row[:, None] * classes + column[None, :]
    value = tl.load(at, mask=inside, other=float("-inf")).to(tl.float32)
    target = tl.load(targets + row, mask=here, other=IGNORED)
    counts = target != IGNORED
    hit = column[None, :] == target[:, None]
    top = tl.max(value, 1)
    raised = tl.exp(value - top[:, None])
    total = tl.sum(raised, 1)
    loss = tl.log(total) + top - tl.sum(tl.where(hit, value, 0.0), 1)
    loss = tl.where((target >= 0) & (target < classes), loss, float("nan"))  # no class: nothing can be raised here
    tl.store(losses + row, tl.where(counts, loss, 0.0), mask=here)
    gradient = raised / total[:, None] - tl.where(hit, 1.0, 0.0)
    gradient = tl.where(counts[:, None], gradient, 0.0)
    tl.store(at, gradient.to(logits.dtype.element_ty), mask=inside)


@triton.jit
def _overwrite_long(  # type: ignore[no-untyped-def]
    logits, targets, losses, classes, IGNORED: tl.constexpr, PIECE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    counts = target != IGNORED
    top = float("-inf")
    total = 0.0
    hit = 0.0
    for first in range(0, classes, PIECE):
        column = first + tl.arange(0, PIECE)
        at = logits + row * classes + column
        value = tl.load(at, mask=column < classes, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(value, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(value - higher), 0)
        hit += tl.sum(tl.where(column == target, value, 0.0), 0)
        top = higher
    loss = tl.where((target >= 0) & (target < classes), tl.log(total) + top - hit, float("nan"))
    tl.store(losses + row, tl.where(counts, loss, 0.0))
    for first in range(0, classes, PIECE):
        column = first + tl.arange(0, PIECE)
        at = logits + row * classes + column
        value = tl.load(at, mask=column < classes, other=float("-inf")).to(tl.float32)
        gradient = tl.exp(value - top) / total - tl.where(column == target, 1.0, 0.0)
        gradient = tl.where(counts, gradient, 0.0)
        tl.store(at, gradient.to(logits.dtype.element_ty), mask=column < classes)


def overwrite(logits: Tensor, targets: Tensor, ignored: int) -> Tensor:
    """The summed loss, float32, NaN where a target is no class and not `ignored`; `logits` (N, V), contiguous, become their
    gradient."""
    (count, classes), targets = logits.shape, targets.contiguous()
    losses = torch.empty(count, dtype=torch.float32, device=logits.device)
    if classes > ELEMENTS:
        _overwrite_long[(count,)](logits, targets, losses, classes, IGNORED=ignored, PIECE=PIECE, num_warps=8)
        return losses.sum()
    block = triton.next_power_of_2(classes)
    rows = max(1, ELEMENTS // block)
    _overwrite[(triton.cdiv(count, rows),)](
        logits, targets, losses, count, classes, IGNORED=ignored, ROWS=rows, BLOCK=block, num_warps=4
    )
    return losses.sum()
