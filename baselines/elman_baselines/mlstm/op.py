"""The recurrence of mLSTM: its stabiliser in one kernel, its matrix, with the normaliser as one more column, in another.

B batch, T time, H heads, N width of a key, V of a value.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from elman_core.kernels import ElementwiseKernel, MatrixKernel

from .reference import stabiliser_step, step

_HEADER = Path(__file__).parent / "csrc" / "mlstm_cells.h"
State = tuple[Tensor, Tensor, Tensor]
ALIGN = 16
"""Columns of a state are a multiple of this: rows that start elsewhere are read by other code, on a CPU with other bits."""


matrix = MatrixKernel("mlstm", header=_HEADER, reference=step, scalars=("decay", "gain"), delta=True, rows=(64, 128))
stabiliser = ElementwiseKernel(
    "mlstm_m",
    header=_HEADER,
    cell="elman::mlstm::Stabiliser",
    step=stabiliser_step,
    streams=("i", "log_f"),
    states=("m",),
)


def mlstm(
    q_BTHN: Tensor,
    k_BTHN: Tensor,
    v_BTHV: Tensor,
    i_BTH: Tensor,
    log_f_BTH: Tensor,
    state: State | None = None,
    mask_BT: Tensor | None = None,
    starts_BT: Tensor | None = None,
) -> tuple[Tensor, State]:
    """m = max(log f + m', i), C = f exp(m' - m) C' + exp(i - m) k vᵀ, n likewise without v, h = Cᵀ q / max(|n·q|, exp(-m)).

    h does not depend on m, given C exp(m) and n exp(m), so inside m is a constant of the backward: the roundings of its terms,
    whose sum is 0, would add up over time. The states that go in and out are scaled by 1, with the gradient of exp(m).

    Args:
        i_BTH, log_f_BTH: in float32 or float64. state: C (B, H, N, V), n (B, H, N), m (B, H); None is zeros.
        mask_BT: bool; where False the states are held and h is arbitrary. starts_BT: bool; where True the states are 0 before
            the step, masked or not.

    Returns:
        h (B, T, H, V) in the dtype of i, and the states in the same dtype.
    """
    mask_TB, starts_TB = (None if x is None else x.T for x in (mask_BT, starts_BT))
    first_BH = i_BTH.new_zeros(i_BTH[:, 0].shape) if state is None else state[2]
    inputs = (x.transpose(0, 1).contiguous() for x in (i_BTH, log_f_BTH))
    before_TBH, m_BH = stabiliser(*inputs, first_BH, mask_TB, starts_TB)
    before_BTH = before_TBH.detach().transpose(0, 1)
    m_BTH = torch.maximum(log_f_BTH.detach() + before_BTH, i_BTH.detach())
    values = v_BTHV.shape[-1]
    spare = -(values + 1) % ALIGN
    start = None
    if state is not None:
        c_BHNV, n_BHN, _ = state
        joined = torch.cat([c_BHNV, n_BHN[..., None], c_BHNV.new_zeros(*n_BHN.shape, spare)], -1)
        start = _scaled(joined, first_BH - first_BH.detach())
    decay_BTH, gain_BTH = (log_f_BTH + before_BTH - m_BTH).exp(), (i_BTH - m_BTH).exp()
    one_BTH1, zero_BTHS = v_BTHV.new_ones(*v_BTHV.shape[:-1], 1), v_BTHV.new_zeros(*v_BTHV.shape[:-1], spare)
    o_BTHU, end = matrix(
        q_BTHN * q_BTHN.shape[-1] ** -0.5, k_BTHN, torch.cat([v_BTHV, one_BTH1, zero_BTHS], -1), decay_BTH, gain_BTH,
        state_BHNV=start, mask_BT=mask_BT, starts_BT=starts_BT,
    )  # fmt: skip
    o_BTHU, end = o_BTHU.to(i_BTH.dtype), _scaled(end, m_BH.detach() - m_BH)
    h_BTHV = o_BTHU[..., :values] / torch.maximum(o_BTHU[..., values, None].abs(), (-m_BTH).exp()[..., None])
    return h_BTHV, (end[..., :values], end[..., values], m_BH)


def _scaled(s_BHNU: Tensor, log_BH: Tensor) -> Tensor:
    return s_BHNU * log_BH.exp()[..., None, None] if torch.is_grad_enabled() else s_BHNU
