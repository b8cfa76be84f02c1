"""M²RNN in plain PyTorch: the reference for the kernels.

B batch, T time, H heads, K rows and V columns of a state.
"""

import torch
from torch import Tensor

from elman_core.nn import each_step, full_precision, hold, restart


@full_precision
def m2rnn_reference(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    forget_BTH: Tensor,
    w_HVV: Tensor,
    state_BHKV: Tensor | None = None,
    mask_BT: Tensor | None = None,
    starts_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """S_t = f_t S_{t-1} + (1 - f_t) tanh(S_{t-1} W + k_t v_tᵀ),  o_t = S_tᵀ q_t, for every head.

    q and k may have one head for all.

    Returns:
        (o (B, T, H, V), S_T). Where the mask is False the state is held; where a document starts it is first set to 0.
    """
    s = (
        v_BTHV.new_zeros(*v_BTHV[:, 0, :, 0].shape, k_BTHK.shape[-1], v_BTHV.shape[-1])
        if state_BHKV is None
        else state_BHKV
    )
    by_step = [None if x is None else x.transpose(0, 1) for x in (k_BTHK, v_BTHV, forget_BTH, mask_BT, starts_BT)]
    outputs = []
    for q, k, v, f, mask_B, start_B in each_step(q_BTHK.transpose(0, 1), *by_step):
        s = restart(s, start_B)
        new = torch.tanh(s @ w_HVV + k[..., None] * v[..., None, :])
        s = hold(torch.lerp(new, s, f[..., None, None]), s, mask_B)
        outputs.append((s * q[..., None]).sum(-2))
    return torch.stack(outputs, 1), s
