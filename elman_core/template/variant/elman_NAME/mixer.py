"""The {{Name}} mixer. T time, B batch, I inner width."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from elman_core import State, option
from elman_core.nn import WrapperConfig, WrapperMixer, orthogonal_, s4d_

from .op import {{name}}


@dataclass(frozen=True)
class {{Name}}Config(WrapperConfig):
    gain: float = option(0.9, "gain of the orthogonal recurrent matrix at the start", gt=0.0, le=2.0)


class {{Name}}Mixer(WrapperMixer):
    """in_proj → silu → h_t = tanh(W h_{t-1} + V x_t + b) → out_proj. State: h (B, I)."""

    config: {{Name}}Config

    def build_cell(self, inner: int) -> None:
        self.v = nn.Linear(inner, inner)
        self.w = nn.Parameter(torch.empty(inner, inner))

    def reset_cell(self) -> None:
        self.v.reset_parameters()
        if self.config.mamba2_init == "s4d":
            s4d_(self.w)
        else:
            orthogonal_(self.w, self.config.gain)

    def cell(
        self, x_TBI: Tensor, z_TBI: Tensor | None, state: State | None, mask_TB: Tensor | None
    ) -> tuple[Tensor, State]:
        y_TBI, h_BI = {{name}}(self.v(x_TBI), self.w, self.vector(state, "h", x_TBI), mask_TB)
        return y_TBI, {"h": h_BI}


def param_count(dim: int, config: {{Name}}Config) -> int:
    """2 D I + 2 I² + I, and I (K + 1) for the convolution."""
    inner = config.inner_width(dim)
    return config.wrapper_params(dim, gated=False) + 2 * inner * inner + inner
