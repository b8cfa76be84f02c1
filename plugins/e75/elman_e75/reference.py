"""E75 in plain PyTorch: the reference for the kernels."""

import torch
from torch import Tensor

from elman_core.nn import matrix_reference


@matrix_reference
def e75_reference(s: Tensor, k: Tensor, v: Tensor, beta: Tensor, b_beta: Tensor, *, linear_state: bool) -> Tensor:
    """S_t = tanh(S_{t-1} diag(g_t) + k_t (v_t - S_{t-1}ᵀ k_t)ᵀ), g_t = sigmoid(beta_t + b_beta): one decay per column."""
    new = torch.addcmul(torch.sigmoid(beta + b_beta) * s, k, v - k.mT @ s)
    return new if linear_state else torch.tanh(new)
