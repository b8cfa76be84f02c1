"""{{Name}} in plain PyTorch: the reference for the kernels."""

from torch import Tensor

from elman_core.nn import matrix_reference


@matrix_reference
def {{name}}_reference(s: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """S_t = tanh(S_{t-1} diag(σ(beta)) + k (v - S_{t-1}ᵀ k)ᵀ). S is (B, H, N, V), k (B, H, N, 1), v and beta (B, H, 1, V)."""
    return (beta.sigmoid() * s + k * (v - k.mT @ s)).tanh()
