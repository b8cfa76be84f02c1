"""The E64 mixer: its parameters. B batch, I inner width."""

from elman_core.nn import ElementwiseForm, ElementwiseMixer

from .op import e64


class E64Mixer(ElementwiseMixer):
    """x → u → silu(u) → h_t = alpha_t h_{t-1} + (1 - alpha_t) tanh(W_x u_t + h_{t-1} + b) → h_t silu(h_t) → out.

    The cell's parameters: w_alpha (weight W_alpha, bias b_alpha) and w_x (W_x and b).
    """

    form = ElementwiseForm(e64, {"w_alpha": 2.0, "w_x": 0.0})
