"""One step of mLSTM's matrix and of its stabiliser."""

from __future__ import annotations

import torch
from torch import Tensor

from elman_core.nn import matrix_reference


@matrix_reference
def step(s: Tensor, k: Tensor, v: Tensor, decay: Tensor, gain: Tensor) -> Tensor:
    return decay * s + gain * k * v


def stabiliser_step(m: Tensor, i: Tensor, log_f: Tensor) -> tuple[Tensor, Tensor]:
    past = log_f + m
    return torch.where(past > i, past, i), m.clone()
