"""E61 in plain PyTorch: the reference for the kernels, and the step that runs on a CPU."""

import torch
from torch import Tensor

from elman_core.nn import gate, self_gate


def step(h: Tensor, a: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """h_t = alpha h_{t-1} + (1 - alpha) k, y_t = h_t silu(h_t), alpha = sigmoid(a)."""
    alpha, beta = gate(a)
    h = alpha * h + beta * k
    return h, self_gate(h)


def step_b(h: Tensor, a: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """h_t = alpha h_{t-1} + k: the decay does not weigh the value."""
    h = gate(a)[0] * h + k
    return h, self_gate(h)


def step_tanh(h: Tensor, a: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """`step` with the value tanh(k)."""
    return step(h, a, torch.tanh(k))
