"""The E68 mixer: its forms and parameters. B batch, I inner width."""

from dataclasses import dataclass
from typing import Literal

from elman_core import option
from elman_core.nn import ElementwiseForm, ElementwiseMixer, WrapperConfig

from .op import e68, e68i

MAPS = {"w_alpha": 2.0, "w_x": 0.0}
FORMS = {
    "s": ElementwiseForm(e68, MAPS, {"delta": 0.5, "b_g": 0.0}),
    "i": ElementwiseForm(e68i, MAPS, {"delta": 0.5, "b_g": 0.5}),
}


@dataclass(frozen=True)
class E68Config(WrapperConfig):
    """How the state gates the value."""

    form: Literal["s", "i"] = option("s", "s: sigmoid(delta h + b_g); i, inverse: sigmoid(b_g - delta |h|)")


class E68Mixer(ElementwiseMixer):
    """x → u → silu(u) → h_t = alpha_t h_{t-1} + (1 - alpha_t) tanh(W_x u_t + b_v) q_t → h_t silu(h_t) → out.

    The cell's parameters: w_alpha (weight W_alpha, bias b_alpha), w_x (W_x and b_v), delta and b_g.
    """

    forms = FORMS
