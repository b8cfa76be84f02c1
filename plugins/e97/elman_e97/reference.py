"""E97 in plain PyTorch: the reference for the kernels."""

import torch
from torch import Tensor

from elman_core.nn import matrix_reference


@matrix_reference
def e97_reference(
    s: Tensor,
    k: Tensor,
    erase: Tensor,
    v: Tensor,
    w: Tensor,
    decay: Tensor,
    write: Tensor | None,
    *,
    linear_state: bool,
) -> Tensor:
    """S_t = tanh(decay_t S_{t-1} + write_t k_t (sigmoid(w_t) v_t - S_{t-1}ᵀ (erase_t k_t))ᵀ)."""
    return _edited(s, k, torch.sigmoid(w) * v - (erase * k).mT @ s, decay, write, linear_state)


@matrix_reference
def e97_raw_reference(
    s: Tensor, k: Tensor, v: Tensor, w: Tensor, decay: Tensor, write: Tensor | None, *, linear_state: bool
) -> Tensor:
    """S_t = tanh(decay_t S_{t-1} + write_t k_t (sigmoid(w_t) v_t)ᵀ)."""
    return _edited(s, k, torch.sigmoid(w) * v, decay, write, linear_state)


def _edited(s: Tensor, k: Tensor, delta: Tensor, decay: Tensor, write: Tensor | None, linear: bool) -> Tensor:
    new = torch.addcmul(decay * s, k, delta if write is None else write * delta)
    return new if linear else torch.tanh(new)
