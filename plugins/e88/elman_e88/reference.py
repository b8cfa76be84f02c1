"""E88 in plain PyTorch: the truth that kernels are compared with.

B batch, T time, H heads, N key width, V value width, G = B H. A state has keys as rows and values as columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from elman_core.nn import each_step, full_precision, hold, restart


@full_precision
def e88_reference(
    q_BTHN: Tensor,
    k_BTHN: Tensor,
    v_BTHV: Tensor,
    decay_BTH: Tensor,
    write_BTH: Tensor | None = None,
    state_BHNV: Tensor | None = None,
    mask_BT: Tensor | None = None,
    starts_BT: Tensor | None = None,
    *,
    linear_state: bool = False,
) -> tuple[Tensor, Tensor]:
    """S_t = tanh(decay_t S_{t-1} + write_t k_t (v_t - S_{t-1}ᵀ k_t)ᵀ),  o_t = S_tᵀ q_t, for every head.

    What is retrieved is read from the state before its decay.

    Args:
        q_BTHN, k_BTHN, v_BTHV: after convolution, SiLU and L2 norm. decay_BTH: in [0, 1]. write_BTH: None is 1.
        state_BHNV: S_0, None is zeros. mask_BT: bool; where False the state is held and o_t means nothing.
        starts_BT: bool; where True S_{t-1} is 0.
        linear_state: no tanh.

    Returns:
        (o_BTHV in the dtype of q, S_T (B, H, N, V) in float32 or float64).
    """
    B, T, H, N = q_BTHN.shape
    V = v_BTHV.shape[-1]
    lines = (_by_step(x).unsqueeze(2) for x in (q_BTHN, k_BTHN, v_BTHV))
    scalars = (None if x is None else _by_step(x[..., None, None]) for x in (decay_BTH, write_BTH))
    flags = (None if x is None else _by_step(x[..., None].expand(B, T, H)) for x in (mask_BT, starts_BT))
    s_GNV = q_BTHN.new_zeros(B * H, N, V) if state_BHNV is None else state_BHNV.reshape(B * H, N, V)
    outputs = []
    for q_G1N, k_G1N, v_G1V, decay_G11, write_G11, mask_G, start_G in each_step(*lines, *scalars, *flags):
        s_GNV = restart(s_GNV, start_G)
        delta_G1V = torch.baddbmm(v_G1V, k_G1N, s_GNV, alpha=-1)
        if write_G11 is not None:
            delta_G1V = delta_G1V * write_G11
        new_GNV = torch.baddbmm(s_GNV * decay_G11, k_G1N.transpose(1, 2), delta_G1V)
        s_GNV = hold(new_GNV if linear_state else torch.tanh(new_GNV), s_GNV, mask_G)
        outputs.append(torch.bmm(q_G1N, s_GNV))
    o_BTHV = torch.stack(outputs).reshape(T, B, H, V).transpose(0, 1)
    return o_BTHV, s_GNV.reshape(B, H, N, V)


def _by_step(x_BTHx: Tensor) -> Tensor:
    """(B, T, H, …) as (T, B H, …), so that a step is one contiguous batch of heads."""
    return x_BTHx.transpose(0, 1).flatten(1, 2)
