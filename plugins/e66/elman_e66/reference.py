"""E66 in plain PyTorch: the reference for the kernels."""

import torch
from torch import Tensor

from elman_core.nn import dense_reference, self_gate


@dense_reference
def e66_reference(a: Tensor, h: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """h_t = g h_{t-1} + (1 - g) tanh(a), g = sigmoid(alpha_t), y_t = h_t silu(h_t), with a = W h_{t-1} + u_t, W = U V."""
    h = torch.sigmoid(alpha) * h + torch.sigmoid(-alpha) * torch.tanh(a)
    return h, self_gate(h)
