"""The E33 mixer: its parameters. B batch, I inner width."""

from elman_core.nn import DenseMixer

from .op import e33


class E33Mixer(DenseMixer):
    """x → silu(u) → h_t = tanh(W_x u_t + W_h h_{t-1} + b) → h_t silu(h_t) → out.

    The cell's parameters: w_x.weight (I, I) is W_x, w_x.bias (I) is b, w_h (I, I) is W_h. State: h (B, I).
    """

    kernel = e33
