"""The E39 mixer: its options and parameters. B batch, I inner width."""

from dataclasses import dataclass

import torch
from torch import nn

from elman_core import option
from elman_core.nn import DenseMixer, RecurrentMatrixConfig

from .op import e39


@dataclass(frozen=True)
class E39Config(RecurrentMatrixConfig):
    """The recurrent matrix, and E38's bias."""

    bias: bool = option(False, "add a learned vector b to x_t: E38")


class E39Mixer(DenseMixer):
    """x → silu(u) → h_t = tanh(u_t + W_h h_{t-1}) → h_t silu(h_t) → out.

    The cell's parameters: w_h (I, I) is W_h; b (I) with `bias`. State: h (B, I).
    """

    kernel = e39
    input = "plain"
    config: E39Config

    def build_cell(self, inner: int) -> None:
        super().build_cell(inner)
        if self.config.bias:
            self.b = nn.Parameter(torch.empty(inner))
