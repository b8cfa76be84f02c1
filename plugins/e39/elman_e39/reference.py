"""E39 in plain PyTorch: the reference for the kernels."""

import torch
from torch import Tensor

from elman_core.nn import dense_reference, self_gate


@dense_reference
def e39_reference(a: Tensor, _h: Tensor) -> tuple[Tensor, Tensor]:
    """h_t = tanh(W h_{t-1} + x_t), y_t = h_t silu(h_t), with a = W h_{t-1} + x_t."""
    h = torch.tanh(a)
    return h, self_gate(h)
