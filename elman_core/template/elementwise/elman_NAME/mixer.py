"""The {{Name}} mixer: its parameters. B batch, I inner width."""

from elman_core.nn import ElementwiseForm, ElementwiseMixer

from .op import {{name}}


class {{Name}}Mixer(ElementwiseMixer):
    """x → u → silu(u) → h_t = f_t h_{t-1} + (1 - f_t) tanh(W_c u_t + r h_{t-1} + b_c) → out.

    The cell's parameters: w_f (weight and bias), w_c (weight and bias), r (I). State: h (B, I).
    """

    form = ElementwiseForm({{name}}, maps={"w_f": 1.0, "w_c": 0.0}, vectors={"r": 0.5})
