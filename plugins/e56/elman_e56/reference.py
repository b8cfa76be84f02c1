"""E56 in plain PyTorch: the reference for the kernels."""

import torch
import torch.nn.functional as F
from torch import Tensor

from elman_core.nn import dense_reference


@dense_reference
def e56_reference(a: Tensor, h: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """h_t = tanh(W_h h_{t-1} + u_t), y_t = h_t silu(z_t), with [W_x | W_h] = W, u_t = W_x x_t + b and a = W_h h_{t-1} + u_t."""
    h = torch.tanh(a)
    return h, h * F.silu(z)
