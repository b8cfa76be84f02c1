"""The mixer of `pure`: its options and parameters. B batch, I inner width."""

from dataclasses import dataclass
from typing import Any

from elman_core import option
from elman_core.nn import DenseMixer, WrapperConfig, xavier_uniform_

from .op import pure


@dataclass(frozen=True)
class PureConfig(WrapperConfig):
    """There is no spectral norm: W_h starts small and is free."""

    r_h_init_gain: float = option(0.5, "Xavier gain of W_h at the start", gt=0.0, le=10.0)


class PureMixer(DenseMixer):
    """x → u → h_t = tanh(W_x u_t + W_h h_{t-1} + b) → h_t → out. With `use_conv`, a SiLU follows the convolution of u.

    The cell's parameters: w_x.weight (I, I) is W_x, w_x.bias (I) is b, w_h (I, I) is W_h. State: h (B, I).
    """

    kernel = pure

    def build_cell(self, inner: int) -> None:
        super().build_cell(inner)
        self.pre_silu = self.config.use_conv

    def reset_matrix(self, w: Any) -> None:
        xavier_uniform_(w, self.config.r_h_init_gain)
