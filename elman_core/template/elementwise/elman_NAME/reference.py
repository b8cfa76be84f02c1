"""{{Name}} in plain PyTorch: the reference for the kernels, and the step that runs on a CPU."""

from torch import Tensor

from elman_core.nn import gate


def step(h: Tensor, f: Tensor, c: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """(new states, y) from the states, the streams and the vectors: h_t = σ(f) h_{t-1} + (1 - σ(f)) tanh(c + r h_{t-1})."""
    open_, shut = gate(f)
    h = open_ * h + shut * (c + r * h).tanh()
    return h, h
