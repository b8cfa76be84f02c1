"""The E63 mixer: its options and parameters. T time, B batch, I inner width."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from elman_core import State, option
from elman_core.nn import DenseMixer, WrapperConfig, linear, orthogonal_, self_gate, xavier_uniform_

from .op import KERNELS


@dataclass(frozen=True)
class E63Config(WrapperConfig):
    """What is kept and what is written. W_h has no spectral norm."""

    form: Literal["a", "b", "c", "d"] = option(
        "a",
        "gates: keep α and write 1 - α (a), write β (b), both of them seeing the state (c), or keep all and write α (d)",
    )


class E63Mixer(DenseMixer):
    """x → silu(u) → h_t = α h_{t-1} + (1 - α) tanh(W_x u_t + W_h h_{t-1} + b), α = σ(W_α u_t + b_α) → h_t silu(h_t) → out.

    The cell's parameters: w_x.weight (I, I) is W_x, w_x.bias (I) is b, w_h (I, I) is W_h, w_alpha.weight (I, I) is W_α,
    w_alpha.bias (I) is b_α; with forms b and c, w_beta.weight (I, I) is W_β, w_beta.bias (I) is b_β; with form c, u_alpha and
    u_beta (I, I) are U_α and U_β. State: h (B, I).
    """

    config: E63Config  # type: ignore[assignment]  # no spectral norm
    w_h: Tensor
    u_alpha: Tensor | None
    u_beta: Tensor | None

    @property
    def kernel(self) -> Any:  # type: ignore[override]
        return KERNELS[self.config.form]

    def build_cell(self, inner: int) -> None:
        super().build_cell(inner)
        self.w_alpha = nn.Linear(inner, inner)
        self.w_beta = nn.Linear(inner, inner) if self.config.form in "bc" else None
        for name in ("u_alpha", "u_beta"):
            made = nn.Parameter(torch.empty(inner, inner)) if self.config.form == "c" else None
            self.register_parameter(name, made)

    def cell(self, x_TBI: Tensor, *rest: Any) -> tuple[Tensor, State]:
        if self.config.form != "c":
            return super().cell(x_TBI, *rest)
        _, state, mask_TB, starts_TB = rest
        assert self.u_alpha is not None and self.u_beta is not None  # noqa: PT018
        w = torch.cat([self.w_h, self.u_alpha, self.u_beta])
        u = torch.cat([linear(self.w_x, x_TBI, self.time), *self.extras(x_TBI, None)], -1)
        h0 = self.vector(state, "h", x_TBI)
        h_TBI, h_BI = self.kernel(u, w, None, h0, mask=mask_TB, starts=starts_TB)
        return self_gate(h_TBI), {"h": h_BI}

    def extras(self, x_TBI: Tensor, z_TBI: Tensor | None) -> tuple[Tensor, ...]:
        return tuple(linear(gate, x_TBI, self.time) for gate in (self.w_alpha, self.w_beta) if gate is not None)

    def reset_cell(self) -> None:
        super().reset_cell()
        for gate, bias in ((self.w_alpha, 0.0 if self.config.form == "d" else 2.0), (self.w_beta, 0.0)):
            if gate is not None:
                xavier_uniform_(gate.weight)
                nn.init.constant_(gate.bias, bias)
        for u in (self.u_alpha, self.u_beta):
            if u is not None:
                orthogonal_(u, 0.1)

    def reset_matrix(self, w: Any) -> None:
        orthogonal_(w, 0.3 if self.config.form == "d" else 0.5)
