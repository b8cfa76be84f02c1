"""Tensors of which each rank holds a part (FSDP2's `DTensor`): put together, and cut up."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from .distributed import Ranks


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor put together, which every rank must ask for; any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def is_sharded(model: nn.Module) -> bool:
    """Whether the ranks share the weights."""
    return any(isinstance(p, DTensor) for p in model.parameters())


def gather_rows(tensor: Tensor, ranks: Ranks) -> Tensor:
    """The rows of all ranks in order, on the first rank, on the CPU; elsewhere the rank's own."""
    own = tensor.detach().cpu().contiguous()
    rows = [torch.empty_like(own) for _ in range(ranks.size)] if ranks.main else None
    dist.gather(own, rows, dst=0)
    return torch.cat(rows) if rows else own


def like(full: Tensor, reference: Tensor) -> Tensor:
    """`full` on the device of `reference`, or this rank's part of it if that is sharded. Nothing is sent."""
    moved = full.to(reference.device)
    if isinstance(reference, DTensor):
        return distribute_tensor(moved, reference.device_mesh, reference.placements, src_data_rank=None)
    return moved


def placed(value: Tensor, parameter: Tensor) -> Tensor:
    """A copy of what an optimizer keeps of a parameter, where that is; a count is no part of it and stays whole."""
    if value.ndim and isinstance(parameter, DTensor):
        return like(value, parameter).clone()
    return torch.empty_like(value, device=parameter.device).copy_(value)
