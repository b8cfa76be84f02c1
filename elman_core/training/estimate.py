"""An estimate of the seconds of a step on a CPU, where the plain PyTorch reference of a recurrence can need minutes for one."""

from __future__ import annotations

import time
from typing import Any

import torch

from elman_core.kernels import dispatch

from .objective import evaluating, forward_loss

SLOW = 5.0
"""Seconds of a step from which a run says so before its first."""


def seconds_a_step(model: Any, rows: int, length: int, accumulate: int = 1) -> float:
    """Seconds of `accumulate` forwards and backwards of `rows` windows of `length` bytes, from the first 16 bytes of a window.

    From 256 bytes where a kernel of this CPU will run, which plain PyTorch replaces on short texts; it is compiled here.
    Weights, gradients, buffers and the random state stay as they are. Autocast is up to the caller.
    """
    weights = [p for p in model.parameters() if p.requires_grad]

    def seconds(count: int) -> float:
        tokens_BT = torch.zeros(rows, count, dtype=torch.long, device=weights[0].device)
        started = time.perf_counter()
        torch.autograd.grad(forward_loss(model, tokens_BT, tokens_BT, logits=False).loss, weights, allow_unused=True)
        return (time.perf_counter() - started) * accumulate * length / count

    with evaluating(model), torch.enable_grad():
        with dispatch.asking(length) as asked:
            seconds(min(length, 2))
        kernels = [dispatch.runs(name, torch.empty(0, dtype=dtype), *rest, cpu=True) for name, dtype, *rest in asked]
        count = min(length, 256 if any(kernels) else 16)
        least = seconds(count)
        until = time.perf_counter() + 2
        while least > SLOW and time.perf_counter() < until:  # on a busy machine, milliseconds can take a second
            least = min(least, seconds(count))
        return least
