"""E88 in plain PyTorch: the reference for the kernels."""

import torch
from torch import Tensor

from elman_core.nn import matrix_reference


@matrix_reference
def e88_reference(
    s: Tensor, k: Tensor, v: Tensor, decay: Tensor, write: Tensor | None = None, *, linear_state: bool = False
) -> Tensor:
    """S_t = tanh(decay_t S_{t-1} + write_t k_t (v_t - S_{t-1}ᵀ k_t)ᵀ): retrieval comes before the decay."""
    delta = v - k.mT @ s
    new = torch.addcmul(decay * s, k, delta if write is None else write * delta)
    return new if linear_state else torch.tanh(new)
