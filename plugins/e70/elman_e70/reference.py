"""E70 in plain PyTorch: the reference for the kernels."""

import torch
from torch import Tensor

from elman_core.nn import matrix_reference


@matrix_reference
def e70_reference(s: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    """S_t = decay S_{t-1} + k_t v_tᵀ."""
    return torch.addcmul(decay * s, k, v)
