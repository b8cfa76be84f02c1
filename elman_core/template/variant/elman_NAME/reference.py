"""{{Name}} in plain PyTorch: the truth that kernels are compared with. T time, B batch, d inner width."""

import torch
from torch import Tensor

from elman_core.nn import full_precision


@full_precision
def {{name}}_reference(u_TBd: Tensor, w_dd: Tensor, h_Bd: Tensor, mask_TB: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """h_t = tanh(W h_{t-1} + u_t), y_t = h_t; where the mask is False the state is held. Returns (y_TBd, h_T)."""
    states = []
    for t, u_Bd in enumerate(u_TBd):
        new_Bd = torch.tanh(u_Bd + h_Bd @ w_dd.T)
        h_Bd = new_Bd if mask_TB is None else torch.where(mask_TB[t, :, None], new_Bd, h_Bd)
        states.append(h_Bd)
    return torch.stack(states), h_Bd
