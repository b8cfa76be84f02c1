"""The E63 mixer: its options and parameters. T time, B batch, I inner width."""

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from elman_core import option
from elman_core.kernels import DenseKernel
from elman_core.nn import DenseMixer, WrapperConfig, linear, orthogonal_, xavier_uniform_

from .op import KERNELS


@dataclass(frozen=True)
class E63Config(WrapperConfig):
    """What is kept and what is written. W_h has no spectral norm."""

    form: Literal["a", "b", "d"] = option(
        "a",
        "gates: keep α and write 1 - α (a), write β (b), or keep all and write α (d); c would need three products a step",
    )


class E63Mixer(DenseMixer):
    """x → silu(u) → h_t = α h_{t-1} + (1 - α) tanh(W_x u_t + W_h h_{t-1} + b), α = σ(W_α u_t + b_α) → h_t silu(h_t) → out.

    The cell's parameters: w_x.weight (I, I) is W_x, w_x.bias (I) is b, w_h (I, I) is W_h, w_alpha.weight (I, I) is W_α,
    w_alpha.bias (I) is b_α; with form b, w_beta.weight (I, I) is W_β, w_beta.bias (I) is b_β. State: h (B, I).
    """

    config: E63Config  # type: ignore[assignment]  # no spectral norm

    @property
    def kernel(self) -> DenseKernel:  # type: ignore[override]
        return KERNELS[self.config.form]

    def build_cell(self, inner: int) -> None:
        super().build_cell(inner)
        self.w_alpha = nn.Linear(inner, inner)
        self.w_beta = nn.Linear(inner, inner) if self.config.form == "b" else None

    @classmethod
    def cell_params(cls, inner: int, config: E63Config) -> int:  # type: ignore[override]
        return super().cell_params(inner, config) + (2 if config.form == "b" else 1) * (inner * inner + inner)

    def extras(self, x_TBI: Tensor, z_TBI: Tensor | None) -> tuple[Tensor, ...]:
        return tuple(linear(gate, x_TBI) for gate in (self.w_alpha, self.w_beta) if gate is not None)

    def reset_cell(self) -> None:
        super().reset_cell()
        for gate, bias in ((self.w_alpha, 0.0 if self.config.form == "d" else 2.0), (self.w_beta, 0.0)):
            if gate is not None:
                xavier_uniform_(gate.weight)
                nn.init.constant_(gate.bias, bias)

    def reset_matrix(self, w: Any) -> None:
        orthogonal_(w, 0.3 if self.config.form == "d" else 0.5)
