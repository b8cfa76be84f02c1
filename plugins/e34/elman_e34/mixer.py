"""The E34 mixer: its options and parameters. B batch, I inner width."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from elman_core import option
from elman_core.nn import ElementwiseForm, ElementwiseMixer, WrapperConfig

from .op import e34


@dataclass(frozen=True)
class E34Config(WrapperConfig):
    """How the recurrent factors are bounded."""

    bound: Literal["clamp", "tanh"] = option(
        "clamp", "of the factors; clamp: delta to ±0.99, without a gradient outside; tanh: tanh(delta)"
    )


class E34Mixer(ElementwiseMixer):
    """x → u → silu(u) → h_t = tanh(W_x u_t + bound(delta) h_{t-1} + b) → h_t silu(h_t) → out.

    The cell's parameters: w_x (weight W_x, bias b) and delta.
    """

    w_x: nn.Linear
    delta: Tensor
    form = ElementwiseForm(e34, {"w_x": 0.0}, {"delta": 0.99})

    def vectors(self) -> list[Tensor]:
        return [self.delta.tanh() if self.config.bound == "tanh" else self.delta.clamp(-0.99, 0.99)]

    def reset_cell(self) -> None:
        super().reset_cell()
        if self.config.mamba2_init:
            nn.init.normal_(self.w_x.weight, std=0.02)
        else:
            nn.init.uniform_(self.delta, 0.9, 0.99)
        if self.config.bound == "tanh":
            self.delta.atanh_()
