"""{{Name}} in plain PyTorch: the reference for the kernels, and the step that runs on a CPU."""

from torch import Tensor

from elman_core.nn import gate


def step(p: tuple[Tensor, ...], u: tuple[Tensor, ...], h: Tensor) -> tuple[Tensor]:
    """h_t = f h_{t-1} + (1 - f) c, f = sigmoid(p_0 + u_0), c = tanh(p_1 + u_1), with p = W_h h_{t-1} and u = W_x x_t + b."""
    f, shut = gate(p[0] + u[0])
    return (f * h + shut * (p[1] + u[1]).tanh(),)
