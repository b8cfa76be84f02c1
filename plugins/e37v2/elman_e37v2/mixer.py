"""The E37v2 mixer: its parameters. B batch, I inner width."""

from elman_core.nn import DenseMixer

from .op import e37v2


class E37v2Mixer(DenseMixer):
    """x → silu(u) → h_t = tanh(W u_t + W h_{t-1} + b) → h_t silu(h_t) → out. Both products share one matrix.

    The cell's parameters: w (I, I), b (I). State: h (B, I).
    """

    kernel = e37v2
    matrix = "w"
    input = "tied"
