"""E71 in plain PyTorch: the reference for the kernels."""

import torch
from torch import Tensor

from elman_core.nn import gate, matrix_reference


@matrix_reference
def e71_reference(s: Tensor, k: Tensor, v: Tensor, alpha: Tensor, d_alpha: Tensor, b_alpha: Tensor) -> Tensor:
    """S_t = S_{t-1} diag(a_t) + k_t ((1 - a_t) v_t)ᵀ, a_t = sigmoid(alpha_t + d_alpha (S_{t-1}ᵀ k_t) + b_alpha)."""
    kept, taken = gate(alpha + d_alpha * (k.mT @ s) + b_alpha)
    return torch.addcmul(kept * s, k, taken * v)
