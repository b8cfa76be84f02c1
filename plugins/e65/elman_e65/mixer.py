"""The E65 mixer: its parameters. B batch, I inner width."""

from elman_core.nn import ElementwiseForm, ElementwiseMixer

from .op import e65


class E65Mixer(ElementwiseMixer):
    """x → u → silu(u) → h_t = alpha_t h_{t-1} + (1 - alpha_t) tanh(W_x u_t + delta h_{t-1} + b) → h_t silu(h_t) → out.

    The cell's parameters: w_alpha (weight W_alpha, bias b_alpha), w_x (W_x and b) and delta.
    """

    form = ElementwiseForm(e65, {"w_alpha": 2.0, "w_x": 0.0}, {"delta": 0.5})
