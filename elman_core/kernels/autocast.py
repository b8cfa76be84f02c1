"""Autocast, which not every device has: torch refuses to switch off, or to ask about, what a device such as meta is without."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """A context in which autocast is off for the device of x."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if has_autocast(kind) else nullcontext()


def autocast_dtype(weight: Tensor) -> torch.dtype:
    """The dtype in which a product with `weight` is computed: autocast's where that is on for the device, else its own."""
    kind = weight.device.type
    if weight.dtype != torch.float64 and has_autocast(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return weight.dtype


@torch.compiler.assume_constant_result  # `torch.compile` cannot trace the question before torch 2.12
def has_autocast(kind: str) -> bool:
    """Whether devices of this kind have autocast."""
    return torch.amp.is_autocast_available(kind)
