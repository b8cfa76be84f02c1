"""The E61 mixer: its forms and parameters. T time, B batch, I inner width."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from elman_core import option
from elman_core.nn import ElementwiseForm, ElementwiseMixer, WrapperConfig, xavier_uniform_

from .op import e61, e61_tanh, e61b

MAPS = {"w_alpha": 2.0, "w_v": 0.0}
FORMS = {
    "a": ElementwiseForm(e61, MAPS),
    "b": ElementwiseForm(e61b, MAPS),
    "c": ElementwiseForm(e61_tanh, {"w": 0.0}),
    "tanh": ElementwiseForm(e61_tanh, MAPS),
}


@dataclass(frozen=True)
class E61Config(WrapperConfig):
    """What is added to the decayed state, and from which maps."""

    form: Literal["a", "b", "c", "tanh"] = option(
        "a", "a: (1 - alpha) v; b: v alone; tanh: (1 - alpha) tanh(v); c: like tanh, alpha and v from one map"
    )


class E61Mixer(ElementwiseMixer):
    """x → u → silu(u) → h_t = alpha_t h_{t-1} + (1 - alpha_t) v_t → h_t silu(h_t) → out.

    The cell's parameters: w_alpha (weight W_alpha, bias b_alpha) and w_v (W_v and b); of form c: w (W and b) alone.
    """

    forms = FORMS
    w_v: nn.Linear

    def streams(self, x_TBI: Tensor) -> list[Tensor]:
        made = super().streams(x_TBI)
        return made * 2 if self.config.form == "c" else made

    def reset_cell(self) -> None:
        super().reset_cell()
        if self.config.form == "b":
            xavier_uniform_(self.w_v.weight, 0.1)
