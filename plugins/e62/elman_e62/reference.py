"""E62 in plain PyTorch: the reference for the kernels, and the step that runs on a CPU."""

import torch
from torch import Tensor

from elman_core.nn import gate, self_gate


def step(h: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """h_t = (1 - sigmoid(k)) h_{t-1} + sigmoid(k) tanh(v), y_t = h_t silu(h_t)."""
    write, keep = gate(k)
    h = keep * h + write * torch.tanh(v)
    return h, self_gate(h)


def step_b(h: Tensor, k: Tensor, alpha: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """`step` with h_{t-1} decayed by sigmoid(alpha) as well."""
    return step(gate(alpha)[0] * h, k, v)
