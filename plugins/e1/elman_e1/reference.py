"""E1 in plain PyTorch: the truth that kernels are compared with. T time, B batch, d inner width."""

import torch
import torch.nn.functional as F
from torch import Tensor

from elman_core.nn import each_step, full_precision, hold, restart


@full_precision
def e1_reference(
    u_TBd: Tensor,
    z_TBd: Tensor,
    w_dd: Tensor,
    h_Bd: Tensor,
    mask_TB: Tensor | None = None,
    starts_TB: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """h_t = tanh(W h_{t-1} + u_t), y_t = h_t silu(z_t), with u_t = W_x x_t + b. Returns (y_TBd, h_T).

    Where the mask is False the state is held and y_t means nothing; where a document starts, h_{t-1} is 0.
    """
    states = []
    for u_Bd, mask_B, start_B in each_step(u_TBd, mask_TB, starts_TB):
        h_Bd = restart(h_Bd, start_B)
        h_Bd = hold(torch.tanh(torch.addmm(u_Bd, h_Bd, w_dd.T)), h_Bd, mask_B)
        states.append(h_Bd)
    return torch.stack(states) * F.silu(z_TBd), h_Bd
