"""Tensors across ranks: parts of sharded tensors (FSDP2's `DTensor`) joined and cut, gradients averaged, bits compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from .group import Ranks

SMALL = 2**18
"""Bytes below which gradients are copied together before they are summed: separate sums would cost more than the copies."""


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor, gathered (every rank must call this); any other tensor unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def is_sharded(model: nn.Module) -> bool:
    """Whether each rank holds only a part of the weights."""
    return any(isinstance(p, DTensor) for p in model.parameters())


def gather_rows(tensor: Tensor, ranks: Ranks) -> Tensor:
    """On the first rank: the rows of all ranks in order, on the CPU. Elsewhere: the rank's own rows."""
    own = tensor.detach().cpu().contiguous()
    rows = [torch.empty_like(own) for _ in range(ranks.size)] if ranks.main else None
    dist.gather(own, rows, dst=0)
    return torch.cat(rows) if rows else own


def like(full: Tensor, reference: Tensor) -> Tensor:
    """`full` on the device of `reference`, or this rank's part of it if `reference` is sharded. Sends nothing."""
    moved = full.to(reference.device)
    if isinstance(reference, DTensor):
        return distribute_tensor(moved, reference.device_mesh, reference.placements, src_data_rank=None)
    return moved


def placed(value: Tensor, parameter: Tensor) -> Tensor:
    """A copy of an optimizer's tensor, on its parameter's device and sharded like it; a scalar count stays whole."""
    if value.ndim and isinstance(parameter, DTensor):
        return like(value, parameter).clone()
    return torch.empty_like(value, device=parameter.device).copy_(value)


def average(grads: Sequence[Tensor], ranks: int) -> None:
    """Replace every gradient by its mean over the `ranks` ranks of the default group. A CUDA graph can record it.

    For a captured step, which cannot use DistributedDataParallel: nothing hides these sums, so they must be fast. A large
    gradient is summed in place, grouped with all others of its dtype, which NCCL runs as one kernel; small ones are copied
    together first. Every rank passes the same gradients in the same order.
    """
    for dtype in dict.fromkeys(g.dtype for g in grads):
        alone: list[Tensor] = []
        copied: list[Tensor] = []
        for grad in (g for g in grads if g.dtype == dtype):
            in_place = grad.is_contiguous() and grad.numel() * grad.element_size() >= SMALL
            (alone if in_place else copied).append(grad)
        flat = [torch.cat([g.flatten() for g in copied])] if copied else []
        means([*alone, *flat], ranks)
        if copied:
            parts = flat[0].split([g.numel() for g in copied])
            torch._foreach_copy_(copied, [part.view_as(g) for part, g in zip(parts, copied, strict=True)])


def means(tensors: list[Tensor], ranks: int) -> None:
    """Means over ranks, in place and all at once. NCCL divides while it sums; gloo cannot."""
    options, group = dist.AllreduceCoalescedOptions(), dist.group.WORLD
    assert group is not None
    divides = tensors[0].is_cuda
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG if divides else dist.ReduceOp.SUM)
    group.allreduce_coalesced(tensors, options).wait()
    if not divides:
        torch._foreach_div_(tensors, ranks)


def checksum(tensors: Iterable[Tensor]) -> int:
    """A number that depends on every bit of these tensors, but not on the order in which a device adds."""
    total = 0
    for tensor in tensors:
        flat = tensor.detach().contiguous().flatten()
        words = flat.view(torch.int32) if flat.element_size() % 4 == 0 else flat.view(torch.uint8)
        total = (total * 31 + int(words.sum(dtype=torch.int64))) % 2**63
    return total
