"""The E66 mixer: its options and parameters. T time, B batch, I inner width, R rank."""

from dataclasses import dataclass

from torch import Tensor, nn

from elman_core import option
from elman_core.nn import DenseMixer, LowRank, WrapperConfig, linear, xavier_uniform_

from .op import e66


@dataclass(frozen=True)
class E66Config(WrapperConfig):
    """The rank of U V, which has no spectral norm."""

    rank: int | None = option(None, "rank of U V; by default inner width / 4, at least 16", ge=1)


class E66Mixer(DenseMixer):
    """x → silu(u) → h_t = α h_{t-1} + (1 - α) tanh(U V h_{t-1} + W_x u_t + b), α = σ(W_α u_t + b_α) → h_t silu(h_t) → out.

    The cell's parameters: w_x.weight (I, I) is W_x, w_x.bias (I) is b, w_h.u (I, R) is U, w_h.v (R, I) is V, w_alpha.weight
    (I, I) is W_α, w_alpha.bias (I) is b_α. State: h (B, I).
    """

    kernel = e66

    def build_cell(self, inner: int) -> None:
        super().build_cell(inner)
        self.w_alpha = nn.Linear(inner, inner)

    @classmethod
    def rank(cls, dim: int, config: E66Config) -> int:
        return max(config.inner_width(dim) // 4, 16) if config.rank is None else config.rank

    def extras(self, x_TBI: Tensor, z_TBI: Tensor | None) -> tuple[Tensor, ...]:
        return (linear(self.w_alpha, x_TBI, self.time),)

    def reset_cell(self) -> None:
        super().reset_cell()
        xavier_uniform_(self.w_alpha.weight)
        nn.init.constant_(self.w_alpha.bias, 2.0)

    def reset_matrix(self, w: LowRank) -> None:
        w.reset(0.5)
