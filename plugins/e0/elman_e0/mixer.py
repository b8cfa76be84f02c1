"""The E0 mixer: its options and parameters. B batch, I inner width."""

from dataclasses import dataclass
from typing import Literal

from elman_core import option
from elman_core.kernels import DenseKernel
from elman_core.nn import InputGatedMixer, RecurrentMatrixConfig

from .op import e0, e0_wgate


@dataclass(frozen=True)
class E0Config(RecurrentMatrixConfig):
    """The recurrent matrix, and what the gate sees."""

    gate: Literal["sum", "projected"] = option("sum", "the gate is silu(h + x + b_g), or silu(W_g x + b_g): E0_wgate")


class E0Mixer(InputGatedMixer):
    """x → u → h_t = tanh(W_x u_t + W_h h_{t-1} + b) → h_t silu(h_t + u_t + b_g) → out. With `use_conv`, a SiLU follows the
    convolution of u.

    The cell's parameters: w_x.weight (I, I) is W_x, w_x.bias (I) is b, w_h (I, I) is W_h, b_g (I); with `gate=projected`, in
    the place of b_g, w_g.weight (I, I) is W_g and w_g.bias (I) is b_g. State: h (B, I).
    """

    config: E0Config

    @property
    def kernel(self) -> DenseKernel:  # type: ignore[override]
        return e0_wgate if self.config.gate == "projected" else e0
