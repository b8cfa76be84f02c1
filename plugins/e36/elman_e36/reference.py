"""E36 in plain PyTorch: the reference for the kernels."""

from torch import Tensor

from elman_core.nn import dense_reference, self_gate


@dense_reference
def e36_reference(a: Tensor, _h: Tensor) -> tuple[Tensor, Tensor]:
    """h_t = W h_{t-1} + u_t, y_t = h_t silu(h_t), with u_t = W_x x_t + b and a = W h_{t-1} + u_t."""
    return a, self_gate(a)
