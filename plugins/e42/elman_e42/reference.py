"""E42 in plain PyTorch: the truth that kernels are compared with. T time, B batch, d inner width."""

from __future__ import annotations

import torch
from torch import Tensor

from elman_core.nn import full_precision, self_gate


@full_precision
def e42_reference(u_TBd: Tensor, w_dd: Tensor, h0_Bd: Tensor, mask_TB: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """h_t = W h_{t-1} + u_t, y_t = h_t silu(h_t).

    Args:
        u_TBd: W x_t + b for all t, with the same W. w_dd: W, rows are outputs. h0_Bd: the initial state.
        mask_TB: bool; where False the state is held and y_t means nothing.

    Returns:
        (y_TBd in the dtype of u, h_T (B, d) in float32 or float64).
    """
    w_t_dd, h_Bd, states = w_dd.T, h0_Bd, []
    for t, u_Bd in enumerate(u_TBd.unbind(0)):
        new_Bd = torch.addmm(u_Bd, h_Bd, w_t_dd)
        h_Bd = new_Bd if mask_TB is None else torch.where(mask_TB[t, :, None], new_Bd, h_Bd)
        states.append(h_Bd)
    return self_gate(torch.stack(states)), h_Bd
