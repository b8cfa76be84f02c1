"""E0 in plain PyTorch: the reference for the kernels. u_t = W_x x_t + b, a = W h_{t-1} + u_t."""

import torch
import torch.nn.functional as F
from torch import Tensor

from elman_core.nn import dense_reference


@dense_reference
def e0_reference(a: Tensor, h: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    """h_t = tanh(W h_{t-1} + u_t), y_t = h_t silu(h_t + m_t), with m_t = x_t + b_g."""
    h = torch.tanh(a)
    return h, h * F.silu(h + m)


@dense_reference
def e0_wgate_reference(a: Tensor, h: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    """h_t = tanh(W h_{t-1} + u_t), y_t = h_t silu(m_t), with m_t = W_g x_t + b_g."""
    h = torch.tanh(a)
    return h, h * F.silu(m)
