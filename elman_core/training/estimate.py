"""An estimate of the seconds of a step on a CPU, where the plain PyTorch reference of a recurrence can need minutes for one."""

from __future__ import annotations

import time
from typing import Any

import torch

from .objective import forward_loss

SLOW = 5.0
"""Seconds of a step from which a run says so before its first."""
_PLAIN, _KERNEL = (2, 16), (256, 256)  # bytes of each window that are read, first without counting the time


def seconds_a_step(model: Any, rows: int, length: int, accumulate: int = 1) -> float:
    """Seconds of `accumulate` forwards and backwards of `rows` windows of `length` bytes, from the first 16 bytes of a window.

    With a kernel of this CPU, which plain PyTorch replaces on short texts, from 256 bytes; so it is compiled and verified here.

    Weights, gradients, buffers and the random state stay as they are. Autocast is up to the caller.
    """
    kernel = any(layer.mixer.backend().startswith(("cpu", "reference, or cpu")) for layer in model.model.layers)
    counts = [min(length, count) for count in (_KERNEL if kernel else _PLAIN)]
    weights = [p for p in model.parameters() if p.requires_grad]
    was_training, seconds = model.training, 0.0
    model.eval()
    try:
        for count in counts:
            tokens_BT = torch.zeros(rows, count, dtype=torch.long, device=weights[0].device)
            started = time.perf_counter()
            loss = forward_loss(model, tokens_BT, tokens_BT, logits=False).loss
            torch.autograd.grad(loss, weights, allow_unused=True)
            seconds = time.perf_counter() - started
    finally:
        model.train(was_training)
    return seconds * accumulate * length / counts[-1]
