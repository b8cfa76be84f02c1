"""E67 in plain PyTorch: the reference for the kernels, and the step that runs on a CPU."""

import torch
from torch import Tensor

from elman_core.nn import gate, self_gate


def step(h: Tensor, a: Tensor, v: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """h_t = alpha h_{t-1} + (1 - alpha) tanh(v), y_t = h_t silu(h_t), alpha = sigmoid(a + delta h_{t-1})."""
    return step_lr(a + delta * h, h, v)


def step_lr(a: Tensor, h: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """`step` with alpha = sigmoid(a), a = W h_{t-1} + u_t, W = U V and u_t = W_alpha x_t + b_alpha."""
    alpha, beta = gate(a)
    h = alpha * h + beta * torch.tanh(v)
    return h, self_gate(h)
