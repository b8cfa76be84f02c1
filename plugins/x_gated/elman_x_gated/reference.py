"""`x_gated` in plain PyTorch: the reference for the kernels."""

import torch
import torch.nn.functional as F
from torch import Tensor

from elman_core.nn import dense_reference


@dense_reference
def x_gated_reference(a: Tensor, h: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    """h_t = tanh(W h_{t-1} + u_t), y_t = h_t silu(m_t), with m_t the gate input, u_t = W_x x_t + b, a = W h_{t-1} + u_t."""
    h = torch.tanh(a)
    return h, h * F.silu(m)
