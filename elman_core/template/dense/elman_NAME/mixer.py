"""The {{Name}} mixer: its parameters. B batch, D model width, I inner width."""

from elman_core.nn import DenseMixer

from .op import {{name}}


class {{Name}}Mixer(DenseMixer):
    """x → u → silu(u) → h_t = tanh(W_x u_t + W_h h_{t-1} + b) → out.

    Parameters: in_proj.weight (I, D), w_x.weight (I, I), w_x.bias (I), w_h (I, I), out_proj.weight (D, I). State: h (B, I).
    """

    kernel = {{name}}
