"""E63 in plain PyTorch: the reference for the kernels.

a = W_h h_{t-1} + W_x x_t + b; alpha and beta are the logits of the gates.
"""

import torch
from torch import Tensor

from elman_core.nn import dense_reference, self_gate


@dense_reference
def e63_reference(a: Tensor, h: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """h_t = g h_{t-1} + (1 - g) tanh(a), g = sigmoid(alpha_t), y_t = h_t silu(h_t)."""
    h = torch.sigmoid(alpha) * h + torch.sigmoid(-alpha) * torch.tanh(a)
    return h, self_gate(h)


@dense_reference
def e63b_reference(a: Tensor, h: Tensor, alpha: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """h_t = sigmoid(alpha_t) h_{t-1} + sigmoid(beta_t) tanh(a), y_t = h_t silu(h_t)."""
    h = torch.sigmoid(alpha) * h + torch.sigmoid(beta) * torch.tanh(a)
    return h, self_gate(h)


@dense_reference
def e63d_reference(a: Tensor, h: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """h_t = h_{t-1} + sigmoid(alpha_t) tanh(a), y_t = h_t silu(h_t)."""
    h = h + torch.sigmoid(alpha) * torch.tanh(a)
    return h, self_gate(h)
