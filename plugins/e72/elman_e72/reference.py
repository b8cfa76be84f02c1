"""E72 in plain PyTorch: the reference for the kernels."""

import torch
from torch import Tensor

from elman_core.nn import gate, matrix_reference


@matrix_reference
def e72_reference(
    s: Tensor, k: Tensor, v: Tensor, alpha: Tensor, d_g: Tensor, b_g: Tensor, b_alpha: Tensor, *, inverse: bool
) -> Tensor:
    """S_t = S_{t-1} diag(a_t) + k_t ((1 - a_t) g_t v_t)ᵀ, g_t = sigmoid(d_g r + b_g) or σ(-d_g |r| + b_g), r = S_{t-1}ᵀ k_t."""
    r = k.mT @ s
    kept, taken = gate(alpha + b_alpha)
    return torch.addcmul(kept * s, k, taken * v * torch.sigmoid(d_g * (-r.abs() if inverse else r) + b_g))
