"""The E1 mixer: its parameters. B batch, D model width, I inner width, K width of the convolution."""

from elman_core.nn import DenseMixer

from .op import e1


class E1Mixer(DenseMixer):
    """x → [u, z] → silu(u) → h_t = tanh(W_x u_t + W_h h_{t-1} + b) → h_t silu(z_t) → out.

    Parameters: in_proj.weight (2I, D), w_x.weight (I, I), w_x.bias (I), w_h (I, I), out_proj.weight (D, I), and
    conv.weight (I, 1, K), conv.bias (I) with `use_conv`. State: h (B, I) and, with `use_conv`, conv (B, K - 1, I).
    """

    kernel = e1
    gated = True
