"""The E67 mixers: their options and parameters. T time, B batch, I inner width, R rank."""

from dataclasses import dataclass

from torch import Tensor, nn

from elman_core import option
from elman_core.nn import DenseMixer, ElementwiseForm, ElementwiseMixer, LowRank, WrapperConfig, linear, xavier_uniform_
from elman_core.registry import State

from .op import e67, e67lr


class E67Mixer(ElementwiseMixer):
    """x → u → silu(u) → h_t = alpha_t h_{t-1} + (1 - alpha_t) tanh(W_x u_t + b_v) → h_t silu(h_t) → out.

    The cell's parameters: w_alpha (weight W_alpha, bias b_alpha), w_x (W_x and b_v) and delta.
    """

    form = ElementwiseForm(e67, {"w_alpha": 2.0, "w_x": 0.0}, {"delta": 0.1})


@dataclass(frozen=True)
class E67lrConfig(WrapperConfig):
    """How many directions of the state the gate sees."""

    rank: int | None = option(None, "rank of U V; by default inner width / 8, at least 8", ge=1)


class E67lrMixer(DenseMixer):
    """As `E67Mixer`, with alpha_t = sigmoid(W_alpha u_t + U V h_{t-1} + b_alpha); U V is formed once a call.

    The cell's parameters: w_alpha (weight W_alpha, bias b_alpha), w_x (W_x and b_v), w_h.u (I, R) and w_h.v (R, I).
    """

    kernel = e67lr

    def build_cell(self, inner: int) -> None:
        super().build_cell(inner)
        self.w_alpha = nn.Linear(inner, inner)

    @classmethod
    def rank(cls, dim: int, config: E67lrConfig) -> int:
        return max(config.inner_width(dim) // 8, 8) if config.rank is None else config.rank

    def cell(  # type: ignore[override]
        self, x_TBI: Tensor, _z: None, state: State | None, *flags_TB: Tensor | None
    ) -> tuple[Tensor, State]:
        u_TBI, v_TBI = (linear(each, x_TBI, self.time) for each in (self.w_alpha, self.w_x))
        y_TBI, h_BI = self.kernel(u_TBI, v_TBI, self.effective(), self.vector(state, "h", x_TBI), *flags_TB)
        return y_TBI, {"h": h_BI}

    def reset_cell(self) -> None:
        super().reset_cell()
        xavier_uniform_(self.w_alpha.weight)
        nn.init.constant_(self.w_alpha.bias, 2.0)

    def reset_matrix(self, w: LowRank) -> None:  # type: ignore[override]
        w.reset(0.1)
