"""E88 in plain PyTorch: the truth that kernels are compared with.

B batch, T time, H heads, N key width, V value width, G = B H. A state has keys as rows and values as columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from elman_core.nn import full_precision


@full_precision
def e88_reference(
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
    """S_t = tanh(decay_t S_{t-1} + write_t k_t (v_t - S_{t-1}ᵀ k_t)ᵀ),  o_t = S_tᵀ q_t, for every head.

    What is retrieved is read from the state before its decay.

    Args:
        q_BTHN, k_BTHN, v_BTHV: after convolution, SiLU and L2 norm. decay_BTH: in [0, 1]. write_BTH: None is 1.
        state_BHNV: S_0, None is zeros. mask_BT: bool; where False the state is held and o_t means nothing.
        linear_state: no tanh.

    Returns:
        (o_BTHV in the dtype of q, S_T (B, H, N, V) in float32 or float64).
    """
    B, T, H, N = q_BTHN.shape
    V = v_BTHV.shape[-1]
    q_TG1N, k_TG1N, v_TG1V = (_by_step(x).unsqueeze(2).unbind(0) for x in (q_BTHN, k_BTHN, v_BTHV))
    decay_TG11 = _by_step(decay_BTH[..., None, None]).unbind(0)
    write_TG11 = None if write_BTH is None else _by_step(write_BTH[..., None, None]).unbind(0)
    mask_TG11 = None if mask_BT is None else _by_step(mask_BT[:, :, None, None, None].expand(B, T, H, 1, 1)).unbind(0)
    s_GNV = q_BTHN.new_zeros(B * H, N, V) if state_BHNV is None else state_BHNV.reshape(B * H, N, V)
    outputs = []
    for t in range(T):
        delta_G1V = torch.baddbmm(v_TG1V[t], k_TG1N[t], s_GNV, alpha=-1)
        if write_TG11 is not None:
            delta_G1V = delta_G1V * write_TG11[t]
        new_GNV = torch.baddbmm(s_GNV * decay_TG11[t], k_TG1N[t].transpose(1, 2), delta_G1V)
        if not linear_state:
            new_GNV = torch.tanh(new_GNV)
        s_GNV = new_GNV if mask_TG11 is None else torch.where(mask_TG11[t], new_GNV, s_GNV)
        outputs.append(torch.bmm(q_TG1N[t], s_GNV))
    o_BTHV = torch.stack(outputs).reshape(T, B, H, V).transpose(0, 1)
    return o_BTHV, s_GNV.reshape(B, H, N, V)


def _by_step(x_BTHx: Tensor) -> Tensor:
    """(B, T, H, …) as (T, B H, …), so that a step is one contiguous batch of heads."""
    return x_BTHx.transpose(0, 1).flatten(1, 2)
