"""The fused form in plain PyTorch: from projections to what a recurrence takes. B batch, T time, H heads, N rows, V columns."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from elman_core.kernels.runtime import without_autocast

from .modules import Maps

_NORM_EPS = 1e-12


def fused_reference(
    reference: Callable[..., tuple[Tensor, Tensor]], qkv_BTC: Tensor, decay_BTH: Tensor, write_BTH: Tensor | None,
    state_BHNV: Tensor | None, mask_BT: Tensor | None, starts_BT: Tensor | None = None,
    *, n_state: int, maps: Maps, a_log_H: Tensor | None, dt_bias_H: Tensor | None, linear_state: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`MatrixKernel.fused` with `reference` behind it, in float32 (float64 beside float64) whatever autocast says.

    Returns:
        o (B, T, H, V) in the dtype of qkv, and S_T as the reference gives it.
    """
    given = (qkv_BTC, decay_BTH, write_BTH, a_log_H, dt_bias_H)
    dtype = torch.float64 if any(x is not None and x.dtype == torch.float64 for x in given) else torch.float32
    with without_autocast(qkv_BTC):
        qkv, decay, write, a_log, dt_bias = (None if x is None else x.to(dtype) for x in given)
        assert qkv is not None
        assert decay is not None
        heads = decay.shape[-1]
        keys = heads * n_state
        qkv = F.silu(qkv) if maps.silu else qkv
        q, k, v = (x.unflatten(-1, (heads, -1)) for x in qkv.split([keys, keys, qkv.shape[-1] - 2 * keys], -1))
        if maps.l2:
            q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS) for x in (q, k))
        if maps.decay == "mamba":
            assert a_log is not None
            assert dt_bias is not None
            decay = torch.exp(-a_log.exp() * F.softplus(decay + dt_bias))
        elif maps.decay == "sigmoid":
            decay = torch.sigmoid(decay)
        write = None if write is None else torch.sigmoid(write)
        o_BTHV, last = reference(q, k, v, decay, write, state_BHNV, mask_BT, starts_BT, linear_state=linear_state)
    return o_BTHV.to(qkv_BTC.dtype), last
