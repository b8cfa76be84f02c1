"""E14 in plain PyTorch: the reference for the kernels."""

import torch
from torch import Tensor

from elman_core.nn import matrix_reference


@matrix_reference
def e14_reference(s: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    """S_t = S_{t-1} diag(sigmoid(decay_t)) + k_t tanh(v_t)ᵀ."""
    return torch.addcmul(torch.sigmoid(decay) * s, k, torch.tanh(v))
