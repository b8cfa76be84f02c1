"""The E62 mixer: its forms and parameters. T time, B batch, I inner width."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from elman_core import option
from elman_core.nn import ElementwiseForm, ElementwiseMixer, WrapperConfig

from .op import e62, e62b

FORMS = {
    "a": ElementwiseForm(e62, {"w_k": -2.0, "w_v": 0.0}),
    "b": ElementwiseForm(e62b, {"w_k": -2.0, "w_alpha": 2.0, "w_v": 0.0}),
    "c": ElementwiseForm(e62, {"w": 0.0}),
}


@dataclass(frozen=True)
class E62Config(WrapperConfig):
    """What decays the state beside the write, and which maps there are."""

    form: Literal["a", "b", "c"] = option(
        "a", "a: writing alone decays; b: a gate alpha of its own as well; c: write gate and value from one map"
    )


class E62Mixer(ElementwiseMixer):
    """x → u → silu(u) → h_t = (1 - k_t) h_{t-1} + k_t tanh(W_v u_t + b), k_t = sigmoid(W_k u_t + b_k) → h_t silu(h_t) → out.

    The cell's parameters: w_k (weight W_k, bias b_k) and w_v (W_v and b); of form b: w_alpha too; of form c: w (W and b) alone.
    """

    forms = FORMS

    def streams(self, x_TBI: Tensor) -> list[Tensor]:
        gate_TBI, *others_TBI = super().streams(x_TBI)
        return [-gate_TBI, gate_TBI] if self.config.form == "c" else [gate_TBI, *others_TBI]
