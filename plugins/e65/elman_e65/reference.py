"""E65 in plain PyTorch: the reference for the kernels, and the step that runs on a CPU."""

import torch
from torch import Tensor

from elman_core.nn import gate, self_gate


def step(h: Tensor, a: Tensor, k: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """h_t = alpha h_{t-1} + (1 - alpha) tanh(k + delta h_{t-1}), y_t = h_t silu(h_t), alpha = sigmoid(a)."""
    alpha, beta = gate(a)
    h = alpha * h + beta * torch.tanh(k + delta * h)
    return h, self_gate(h)
