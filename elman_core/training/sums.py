"""Means of gradients over ranks, after the backward: for a captured step, which has no place for DistributedDataParallel.

Nothing hides these sums, so what counts is how long they take. A large gradient is summed where it lies, in one group with all
others of its dtype, of which NCCL makes one kernel; small ones are copied together first. Gradients have the shapes of their
weights; every rank gives the same ones in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

SMALL = 2**18
"""Bytes below which a gradient is copied behind its neighbours: a sum of its own would cost more than that."""


def average(grads: Sequence[Tensor], ranks: int) -> None:
    """Make every gradient its mean over the ranks of the default group. A CUDA graph can hold it.

    Args:
        ranks: their number.
    """
    for dtype in dict.fromkeys(g.dtype for g in grads):
        alone: list[Tensor] = []
        copied: list[Tensor] = []
        for grad in (g for g in grads if g.dtype == dtype):
            lies = grad.is_contiguous() and grad.numel() * grad.element_size() >= SMALL
            (alone if lies else copied).append(grad)
        flat = [torch.cat([g.flatten() for g in copied])] if copied else []
        means([*alone, *flat], ranks)
        if copied:
            parts = flat[0].split([g.numel() for g in copied])
            torch._foreach_copy_(copied, [part.view_as(g) for part, g in zip(parts, copied, strict=True)])


def means(tensors: list[Tensor], ranks: int) -> None:
    """Means over ranks, in place and all at once. NCCL divides on the way; gloo cannot."""
    options, group = dist.AllreduceCoalescedOptions(), dist.group.WORLD
    assert group is not None
    divides = tensors[0].is_cuda
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG if divides else dist.ReduceOp.SUM)
    group.allreduce_coalesced(tensors, options).wait()
    if not divides:
        torch._foreach_div_(tensors, ranks)
