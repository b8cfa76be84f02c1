"""The recurrences of GRU and LSTM one step after the other: slow, obvious, float64-capable.

T time, B batch, I width of the input, d width of the state. `weights` is (w_ih, w_hh, b_ih, b_hh) as in torch.nn.GRU and LSTM:
the rows of the gates below each other, r z n for a GRU and i f g o for an LSTM.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from elman_core.nn import each_step, full_precision, hold, restart

Weights = tuple[Tensor, ...]


@full_precision
def _gru(
    x_TBI: Tensor,
    h_Bd: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor,
    b_hh: Tensor | None,
    mask_TB: Tensor | None,
    starts_TB: Tensor | None,
) -> tuple[Tensor, Tensor]:
    y_TBd = []
    w_gates, w_new = w_hh.split((2 * w_hh.shape[1], w_hh.shape[1]))
    for g_B3d, mask_B, start_B in each_step(F.linear(x_TBI, w_ih, b_ih), mask_TB, starts_TB):
        h_Bd = restart(h_Bd, start_B)
        gates_B2d, new_Bd = g_B3d.split((2 * h_Bd.shape[1], h_Bd.shape[1]), -1)
        if b_hh is not None:  # the reset gate acts on the product, its bias included
            u_B2d, u_Bd = F.linear(h_Bd, w_hh, b_hh).split((2 * h_Bd.shape[1], h_Bd.shape[1]), -1)
            r_Bd, z_Bd = torch.sigmoid(gates_B2d + u_B2d).chunk(2, -1)
            n_Bd = torch.tanh(new_Bd + r_Bd * u_Bd)
        else:  # the reset gate acts on the state, before the product
            r_Bd, z_Bd = torch.sigmoid(gates_B2d + h_Bd @ w_gates.T).chunk(2, -1)
            n_Bd = torch.tanh(new_Bd + (r_Bd * h_Bd) @ w_new.T)
        h_Bd = hold((1 - z_Bd) * n_Bd + z_Bd * h_Bd, h_Bd, mask_B)
        y_TBd.append(h_Bd)
    return torch.stack(y_TBd), h_Bd


def gru_reference(
    x_TBI: Tensor, weights: Weights, h0_Bd: Tensor, mask_TB: Tensor | None = None, starts_TB: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(y (T, B, d) in the dtype of x, hT (B, d)). Where the mask is False the state is held; where a document starts, it is 0.

    With four weights this is torch.nn.GRU. Without b_hh it is the form of Cho et al. 2014 and of the predecessor, in which the
    reset gate acts on the state before the product, n = tanh(W x + b + U (r h')), and there is one bias. (The predecessor calls
    1 - z what is z here.)
    """
    w_ih, w_hh, b_ih, *rest = weights
    y_TBd, h_Bd = _gru(x_TBI, h0_Bd, w_ih, w_hh, b_ih, rest[0] if rest else None, mask_TB, starts_TB)
    return y_TBd, h_Bd


@full_precision
def _lstm(
    x_TBI: Tensor,
    h_Bd: Tensor,
    c_Bd: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor,
    b_hh: Tensor,
    mask_TB: Tensor | None,
    starts_TB: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    y_TBd = []
    for g_B4d, mask_B, start_B in each_step(F.linear(x_TBI, w_ih, b_ih), mask_TB, starts_TB):
        h_Bd, c_Bd = restart(h_Bd, start_B), restart(c_Bd, start_B)
        i_Bd, f_Bd, g_Bd, o_Bd = (g_B4d + F.linear(h_Bd, w_hh, b_hh)).chunk(4, -1)
        c_next_Bd = torch.sigmoid(f_Bd) * c_Bd + torch.sigmoid(i_Bd) * torch.tanh(g_Bd)
        h_next_Bd = torch.sigmoid(o_Bd) * torch.tanh(c_next_Bd)
        h_Bd, c_Bd = hold(h_next_Bd, h_Bd, mask_B), hold(c_next_Bd, c_Bd, mask_B)
        y_TBd.append(h_Bd)
    return torch.stack(y_TBd), h_Bd, c_Bd


def lstm_reference(
    x_TBI: Tensor,
    weights: Weights,
    h0_Bd: Tensor,
    c0_Bd: Tensor,
    mask_TB: Tensor | None = None,
    starts_TB: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(y (T, B, d) in the dtype of x, hT (B, d), cT (B, d)) of torch.nn.LSTM, with mask and starts as for the GRU."""
    w_ih, w_hh, b_ih, b_hh = weights
    return _lstm(x_TBI, h0_Bd, c0_Bd, w_ih, w_hh, b_ih, b_hh, mask_TB, starts_TB)
