"""The E4 mixer: its options and parameters. D model width, B batch, I inner width, R rank."""

from dataclasses import dataclass
from typing import Literal

from torch import nn

from elman_core import option
from elman_core.nn import DenseMixer, LowRank, WrapperConfig

from .op import e4


@dataclass(frozen=True)
class E4Config(WrapperConfig):
    """W_h = U V and what bounds it. `mamba2_init` draws W_x like the projections and does not affect U and V."""

    rank: int | None = option(None, "rank of U V; by default model width / (2 expansion), at least 16", ge=1)
    r_h_mode: Literal["spectral_norm", "none"] = option("spectral_norm", "what bounds U V")
    spectral_radius: float = option(0.95, "largest singular value of U V under spectral_norm", gt=0.0, le=2.0)


class E4Mixer(DenseMixer):
    """x → [u, z] → silu(u) → h_t = tanh(W_x u_t + U V h_{t-1} + b) → h_t silu(z_t) → out.

    The cell's parameters: w_x.weight (I, I) is W_x, w_x.bias (I) is b, w_h.u (I, R) is U, w_h.v (R, I) is V. State: h (B, I).
    The spectral norm scales the product, as if U and V were each scaled by the root of the factor.
    """

    kernel = e4
    gated = True

    @classmethod
    def rank(cls, dim: int, config: E4Config) -> int:
        return max(16, int(dim / (2 * config.expansion))) if config.rank is None else config.rank

    def reset_cell(self) -> None:
        super().reset_cell()
        if self.config.mamba2_init:
            nn.init.normal_(self.w_x.weight, std=0.02)

    def reset_matrix(self, w: LowRank) -> None:
        w.reset(0.3)
