"""The recurrence: the one place that chooses an implementation.

B batch, T time, H heads, N key width, V value width, C = H (2 N + V).
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from elman_core.kernels import MatrixKernel
from elman_core.nn import full_precision

from .reference import e88_reference

__all__ = ["e88", "e88_fused", "matrix"]


@full_precision
def e88_fused_reference(
    qkv_BTC: Tensor,
    decay_BTH: Tensor,
    write_BTH: Tensor | None = None,
    state_BHNV: Tensor | None = None,
    mask_BT: Tensor | None = None,
    *,
    n_state: int,
    silu: bool = True,
    l2_norm: bool = True,
    a_log_H: Tensor | None = None,
    dt_bias_H: Tensor | None = None,
    decay: str = "mamba",
    linear_state: bool = False,
) -> tuple[Tensor, Tensor]:
    """`e88_fused` in plain PyTorch."""
    heads = decay_BTH.shape[-1]
    keys = heads * n_state
    qkv_BTC = F.silu(qkv_BTC) if silu else qkv_BTC
    q, k, v = (x.unflatten(-1, (heads, -1)) for x in qkv_BTC.split([keys, keys, qkv_BTC.shape[-1] - 2 * keys], -1))
    if l2_norm:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-12) for x in (q, k))
    if decay == "mamba":
        assert a_log_H is not None
        assert dt_bias_H is not None
        decay_BTH = torch.exp(-a_log_H.exp() * F.softplus(decay_BTH + dt_bias_H))
    elif decay == "sigmoid":
        decay_BTH = torch.sigmoid(decay_BTH)
    write_BTH = None if write_BTH is None else torch.sigmoid(write_BTH)
    return e88_reference(q, k, v, decay_BTH, write_BTH, state_BHNV, mask_BT, linear_state=linear_state)


matrix = MatrixKernel(
    "e88",
    header=Path(__file__).parent / "csrc" / "e88_cell.h",
    cell="elman::e88::Cell",
    reference=e88_reference,
    fused_reference=e88_fused_reference,
)


def e88(
    q_BTHN: Tensor,
    k_BTHN: Tensor,
    v_BTHV: Tensor,
    decay_BTH: Tensor,
    write_BTH: Tensor | None = None,
    state_BHNV: Tensor | None = None,
    mask_BT: Tensor | None = None,
    *,
    linear_state: bool = False,
) -> tuple[Tensor, Tensor]:
    """As `e88_reference`, on the fastest back end that this device has."""
    return matrix(q_BTHN, k_BTHN, v_BTHV, decay_BTH, write_BTH, state_BHNV, mask_BT, linear_state=linear_state)


def e88_fused(
    qkv_BTC: Tensor,
    decay_BTH: Tensor,
    write_BTH: Tensor | None = None,
    state_BHNV: Tensor | None = None,
    mask_BT: Tensor | None = None,
    *,
    n_state: int,
    silu: bool = True,
    l2_norm: bool = True,
    a_log_H: Tensor | None = None,
    dt_bias_H: Tensor | None = None,
    decay: str = "mamba",
    linear_state: bool = False,
) -> tuple[Tensor, Tensor]:
    """From raw projections: q, k and v side by side in one tensor, with SiLU, L2 norm and the decay's map inside the kernel.

    Args:
        decay_BTH: for decay "mamba" a in exp(-exp(A_log) softplus(a + dt_bias)); "sigmoid": its logit; "given": the decay.
        write_BTH: logit of the write strength; None is strength 1.
    """
    return matrix.fused(
        qkv_BTC, decay_BTH, write_BTH, state_BHNV, mask_BT, n_state=n_state, silu=silu, l2_norm=l2_norm,
        a_log_H=a_log_H, dt_bias_H=dt_bias_H, decay=decay, linear_state=linear_state,
    )  # fmt: skip
