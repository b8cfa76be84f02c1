"""E63 in plain PyTorch: the truth that kernels are compared with.

a = W_h h_{t-1} + W_x x_t + b; alpha and beta are the logits of the gates.
"""

import torch
from torch import Tensor

from elman_core.nn import dense_reference, each_step, full_precision, hold, restart, self_gate


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


@full_precision
def e63c_reference(
    u_TBG: Tensor, w_Gd: Tensor, h_Bd: Tensor, mask_TB: Tensor | None = None, starts_TB: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As form b, with gates that see the state: G = 3 d, of the candidate, alpha and beta; W is W_h, U_alpha, U_beta."""
    outputs = []
    for u_BG, mask_B, start_B in each_step(u_TBG, mask_TB, starts_TB):
        h_Bd = restart(h_Bd, start_B)
        a, alpha, beta = torch.addmm(u_BG, h_Bd, w_Gd.T).chunk(3, -1)
        h_Bd = hold(torch.sigmoid(alpha) * h_Bd + torch.sigmoid(beta) * torch.tanh(a), h_Bd, mask_B)
        outputs.append(h_Bd)
    return self_gate(torch.stack(outputs)), h_Bd
