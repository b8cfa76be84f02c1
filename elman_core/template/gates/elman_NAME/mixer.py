"""The {{Name}} mixer: its parameters. B batch, I inner width."""

from elman_core.nn import GatesMixer

from .op import {{name}}


class {{Name}}Mixer(GatesMixer):
    """x → u → silu(u) → h_t = f_t h_{t-1} + (1 - f_t) c_t → out.

    The cell's parameters, f above c: w_x.weight (2I, I), w_x.bias (2I), w_h (2I, I). State: h (B, I).
    """

    kernel = {{name}}
    start = {0: 1.0}  # of the bias of f
