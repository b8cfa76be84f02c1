"""E23 in plain PyTorch. T time, B batch, I inner width, N slots of the tape."""

import torch
from torch import Tensor

from elman_core.nn import each_step, full_precision, hold, invariant_linear, restart


@full_precision
def e23_reference(
    u_TBI: Tensor,
    w_h: Tensor,
    w_w: Tensor,
    h_BI: Tensor,
    tape_BNI: Tensor,
    initial_NI: Tensor,
    mask_TB: Tensor | None = None,
    starts_TB: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(h of every step (T, B, I), h_T (B, I), the tape after T (B, N, I)), with u_t = W_x x_t + b.

    Where the mask is False the states are held; where a document starts, h becomes 0 and the tape `initial_NI`.
    """
    outputs = []
    for u_BI, mask_B, start_B in each_step(u_TBI, mask_TB, starts_TB):
        h_BI, tape_BNI = restart(h_BI, start_B), restart(tape_BNI, start_B, initial_NI)
        read_BI = (attention(tape_BNI, h_BI) * tape_BNI).sum(1)
        new_BI = torch.tanh(u_BI + invariant_linear(h_BI, w_h) + read_BI)
        share_BN1 = attention(tape_BNI, new_BI)  # from the tape before the write
        new_BNI = (1 - share_BN1) * tape_BNI + share_BN1 * invariant_linear(new_BI, w_w)[:, None]
        h_BI, tape_BNI = hold(new_BI, h_BI, mask_B), hold(new_BNI, tape_BNI, mask_B)
        outputs.append(h_BI)
    return torch.stack(outputs), h_BI, tape_BNI


def attention(tape_BNI: Tensor, h_BI: Tensor) -> Tensor:
    """softmax over the slots of M h / √I, (B, N, 1)."""
    return torch.softmax(tape_BNI @ h_BI[..., None] * h_BI.shape[-1] ** -0.5, 1)
