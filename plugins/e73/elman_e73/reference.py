"""E73 in plain PyTorch: the reference for the kernels. z of a key multiplies a row of S, z of a value a column."""

import torch
from torch import Tensor

from elman_core.nn import matrix_reference


@matrix_reference
def column(s: Tensor, k: Tensor, z: Tensor, v: Tensor) -> Tensor:
    """S_t = tanh(diag(z_t) S_{t-1} + k_t v_tᵀ)."""
    return torch.tanh(torch.addcmul(z * s, k, v))


@matrix_reference
def row(s: Tensor, k: Tensor, v: Tensor, logit: Tensor) -> Tensor:
    """S_t = tanh(S_{t-1} diag(z_t) + k_t v_tᵀ), z = tanh(logit)."""
    return torch.tanh(torch.addcmul(torch.tanh(logit) * s, k, v))


@matrix_reference
def full(s: Tensor, k: Tensor, z: Tensor, v: Tensor, logit: Tensor) -> Tensor:
    """S_t = tanh(diag(z_t) S_{t-1} diag(z_t) + k_t v_tᵀ), z = tanh(logit)."""
    return torch.tanh(torch.addcmul(z * s * torch.tanh(logit), k, v))


@matrix_reference
def delta(s: Tensor, k: Tensor, z: Tensor, v: Tensor) -> Tensor:
    """S_t = tanh(S_{t-1} + k_t (v_t - S_{t-1}ᵀ (z_t k_t))ᵀ)."""
    return torch.tanh(torch.addcmul(s, k, v - (z * k).mT @ s))
