"""The recurrence of Mamba-2 in plain PyTorch: step by step, as the reference, and in chunks, which is fast.

B batch, T time, H heads, P width of a head, N width of the state; L steps of a chunk. States are (B, H, P, N).
"""

from __future__ import annotations

import torch
from torch import Tensor

from elman_baselines.chunks import chunks, decays
from elman_core.nn import each_step, full_precision, restart

CHUNK = 64


@full_precision
def ssd_reference(
    x_BTHP: Tensor,
    dt_BTH: Tensor,
    a_H: Tensor,
    b_BTN: Tensor,
    c_BTN: Tensor,
    d_H: Tensor,
    state_BHPN: Tensor | None,
    starts_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """h_t = exp(a dt_t) h_{t-1} + dt_t x_t b_tᵀ,  y_t = h_t c_t + d x_t, one step after the other.

    Args:
        dt_BTH: after its softplus; 0 holds the state. a_H: negative. state_BHPN: None is zeros.
        starts_BT: bool; where True h_{t-1} is 0.

    Returns:
        (y_BTHP in the dtype of x, the last state in float32 or float64).
    """
    h_BHPN = _start(x_BTHP, b_BTN, state_BHPN)
    outputs = []
    by_step = (t.transpose(0, 1) for t in (x_BTHP, dt_BTH, b_BTN, c_BTN))
    for x, dt, b, c, start in each_step(*by_step, None if starts_BT is None else starts_BT.T):
        decay = torch.exp(a_H * dt)[..., None, None]
        h_BHPN = decay * restart(h_BHPN, start) + (dt[..., None] * x)[..., None] * b[:, None, None, :]
        outputs.append((h_BHPN * c[:, None, None, :]).sum(-1) + d_H[:, None] * x)
    return torch.stack(outputs, 1), h_BHPN


@full_precision
def ssd_chunked(
    x_BTHP: Tensor,
    dt_BTH: Tensor,
    a_H: Tensor,
    b_BTN: Tensor,
    c_BTN: Tensor,
    d_H: Tensor,
    state_BHPN: Tensor | None,
    starts_BT: Tensor | None = None,
    *,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """The same through state-space duality: inside a chunk a masked product of c, b and x, between chunks the state."""
    if x_BTHP.shape[1] == 1:
        return ssd_reference(x_BTHP, dt_BTH, a_H, b_BTN, c_BTN, d_H, state_BHPN, starts_BT)
    h_BHPN = _start(x_BTHP, b_BTN, state_BHPN)
    written_BTHP = dt_BTH[..., None] * x_BTHP
    outputs = []
    for x, log, b, c, starts in chunks(chunk, written_BTHP, a_H * dt_BTH, b_BTN, c_BTN, starts_BT):
        between_BHLL, since_BHL, to_end_BHL = decays(log, starts)
        inside_BLHP = torch.einsum("bhls,bshp->blhp", (c @ b.mT)[:, None] * between_BHLL, x)
        before_BLHP = torch.einsum("bln,bhpn,bhl->blhp", c, h_BHPN, since_BHL)
        outputs.append(inside_BLHP + before_BLHP)
        h_BHPN = since_BHL[..., -1, None, None] * h_BHPN + torch.einsum("bsn,bhs,bshp->bhpn", b, to_end_BHL, x)
    return torch.cat(outputs, 1) + d_H[:, None] * x_BTHP, h_BHPN


def _start(x_BTHP: Tensor, b_BTN: Tensor, state_BHPN: Tensor | None) -> Tensor:
    if state_BHPN is not None:
        return state_BHPN
    return x_BTHP.new_zeros(x_BTHP.shape[0], *x_BTHP.shape[2:], b_BTN.shape[-1])
