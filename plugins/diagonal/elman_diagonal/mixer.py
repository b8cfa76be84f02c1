"""The diagonal mixer: its forms and parameters. B batch, I inner width."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from elman_core import option
from elman_core.nn import ElementwiseForm, ElementwiseMixer, WrapperConfig, compute_dtype

from .op import diagonal, diagonal_tanh

FORMS = {
    "linear": ElementwiseForm(diagonal, {"w_x": 0.0}, {"alpha_hat": -2.0, "b_g": 0.0}),
    "tanh": ElementwiseForm(diagonal_tanh, {"w_x": 0.0}, {"alpha_hat": -2.0, "b_g": 0.0}),
}


@dataclass(frozen=True)
class DiagonalConfig(WrapperConfig):
    """How long a channel remembers, and whether a tanh bounds it."""

    form: Literal["linear", "tanh"] = option("linear", "tanh: h_t = tanh(alpha h_{t-1} + W_x x_t + b)")
    alpha_init: float = option(
        -2.0, "logit of alpha at the start: -2 remembers one step, 2 eight, 4.6 a hundred", ge=-10.0, le=10.0
    )


class DiagonalMixer(ElementwiseMixer):
    """x → u → h_t = alpha h_{t-1} + W_x u_t + b, alpha = sigmoid(alpha_hat) → h_t silu(u_t + b_g) → out.

    With `use_conv`, u is silu of the convolution; without it, u is the projection itself.

    The cell's parameters: w_x (weight W_x, bias b), alpha_hat and b_g.
    """

    forms = FORMS
    w_x: nn.Linear
    alpha_hat: Tensor
    b_g: Tensor

    def build_cell(self, inner: int) -> None:
        super().build_cell(inner)
        self.pre_silu = self.config.use_conv

    def streams(self, x_TBI: Tensor) -> list[Tensor]:
        return [*super().streams(x_TBI), x_TBI]

    def vectors(self) -> list[Tensor]:
        return [torch.sigmoid(self.alpha_hat.to(compute_dtype(self.alpha_hat))), self.b_g]

    def reset_cell(self) -> None:
        super().reset_cell()
        nn.init.constant_(self.alpha_hat, self.config.alpha_init)
        if self.config.mamba2_init:
            nn.init.normal_(self.w_x.weight, std=0.02)
