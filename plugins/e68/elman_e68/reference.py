"""E68 in plain PyTorch: the reference for the kernels, and the step that runs on a CPU."""

import torch
from torch import Tensor

from elman_core.nn import gate, self_gate


def step(h: Tensor, a: Tensor, k: Tensor, delta: Tensor, b_g: Tensor) -> tuple[Tensor, Tensor]:
    """h_t = alpha h_{t-1} + (1 - alpha) tanh(k) sigmoid(delta h_{t-1} + b_g), y_t = h_t silu(h_t), alpha = sigmoid(a)."""
    alpha, beta = gate(a)
    h = alpha * h + beta * torch.tanh(k) * gate(delta * h + b_g)[0]
    return h, self_gate(h)


def step_i(h: Tensor, a: Tensor, k: Tensor, delta: Tensor, b_g: Tensor) -> tuple[Tensor, Tensor]:
    """`step` with the value gated by sigmoid(b_g - delta |h_{t-1}|)."""
    alpha, beta = gate(a)
    h = alpha * h + beta * torch.tanh(k) * gate(b_g - delta * h.abs())[0]
    return h, self_gate(h)
