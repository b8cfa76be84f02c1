"""diagonal in plain PyTorch: the reference for the kernels, and the step that runs on a CPU."""

import torch
import torch.nn.functional as F
from torch import Tensor


def step(h: Tensor, u: Tensor, x: Tensor, alpha: Tensor, b_g: Tensor) -> tuple[Tensor, Tensor]:
    """h_t = alpha h_{t-1} + u_t, y_t = h_t silu(x_t + b_g), with u_t = W_x x_t + b."""
    h = alpha * h + u
    return h, h * F.silu(x + b_g)


def step_tanh(h: Tensor, u: Tensor, x: Tensor, alpha: Tensor, b_g: Tensor) -> tuple[Tensor, Tensor]:
    """`step` with h_t = tanh(alpha h_{t-1} + u_t)."""
    h = torch.tanh(alpha * h + u)
    return h, h * F.silu(x + b_g)
