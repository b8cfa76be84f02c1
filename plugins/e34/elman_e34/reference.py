"""E34 in plain PyTorch: the reference for the kernels, and the step that runs on a CPU."""

import torch
from torch import Tensor

from elman_core.nn import self_gate


def step(h: Tensor, u: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """h_t = tanh(u_t + delta h_{t-1}), y_t = h_t silu(h_t), with u_t = W_x x_t + b."""
    h = torch.tanh(u + delta * h)
    return h, self_gate(h)
