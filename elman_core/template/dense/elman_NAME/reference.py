"""{{Name}} in plain PyTorch: the reference for the kernels."""

import torch
from torch import Tensor

from elman_core.nn import dense_reference


@dense_reference
def {{name}}_reference(a: Tensor, _h: Tensor) -> tuple[Tensor, Tensor]:
    """h_t = tanh(W h_{t-1} + u_t), y_t = h_t, with u_t = W_x x_t + b and a = W h_{t-1} + u_t."""
    h = torch.tanh(a)
    return h, h
