"""The E42 mixer: its options, parameters and initialisation. T time, B batch, I inner width (d of the equations)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from elman_core import State, option
from elman_core.nn import SpectralNorm, WrapperConfig, WrapperMixer, orthogonal_, s4d_, xavier_uniform_

from .op import e42_projected, e42_silu_projected, tied


@dataclass(frozen=True)
class E42Config(WrapperConfig):
    """Options of E42, beside those of the wrapper."""

    r_h_mode: Literal["spectral_norm", "none"] = option(
        "spectral_norm", "what bounds the matrix W; without a bound the linear state can grow without limit"
    )
    spectral_radius: float = option(0.999, "largest singular value of W under spectral_norm", gt=0.0, le=2.0)
    r_h_init_gain: float = option(0.1, "Xavier gain of W at the start", gt=0.0, le=10.0)


class E42Mixer(WrapperMixer):
    """x → u → silu(u) → h_t = W u_t + W h_{t-1} + b → h_t silu(h_t) → out. Both products share one matrix.

    Parameters: in_proj.weight (I, D), w (I, I), b (I), out_proj.weight (D, I), and conv.weight (I, 1, K), conv.bias (I) with
    `use_conv`. State: h (B, I) and, with `use_conv`, conv (B, K - 1, I).
    """

    fp32_params = ("spectral.u", "spectral.v")
    config: E42Config

    def build_cell(self, inner: int) -> None:
        self.w = nn.Parameter(torch.empty(inner, inner))
        self.b = nn.Parameter(torch.empty(inner))
        spectral = self.config.r_h_mode == "spectral_norm"
        self.spectral = SpectralNorm(inner, self.config.spectral_radius) if spectral else None

    def cell(
        self, x_TBI: Tensor, z_TBI: Tensor | None, state: State | None, mask_TB: Tensor | None
    ) -> tuple[Tensor, State]:
        y_TBI, h_BI = e42_projected(x_TBI, self.effective(), self.b, self.vector(state, "h", x_TBI), mask_TB)
        return y_TBI, {"h": h_BI}

    def cell_of_silu(
        self, u_TBI: Tensor, z_TBI: Tensor | None, state: State | None, mask_TB: Tensor | None
    ) -> tuple[Tensor, State]:
        y_TBI, h_BI = e42_silu_projected(u_TBI, self.effective(), self.b, self.vector(state, "h", u_TBI), mask_TB)
        return y_TBI, {"h": h_BI}

    def effective(self) -> Tensor:
        """The W of the recurrence: with its largest singular value as asked."""
        return self.w if self.spectral is None else self.spectral(self.w)

    def backend(self) -> str:
        return tied.backend(self.w.device, self.inner)

    def reset_cell(self) -> None:
        init = self.config.mamba2_init
        nn.init.zeros_(self.b)
        if init == "s4d":
            s4d_(self.w)
        elif init:
            orthogonal_(self.w, 0.999)
        else:
            xavier_uniform_(self.w, self.config.r_h_init_gain)
        if self.spectral is not None:
            self.spectral.reset()


def param_count(dim: int, config: E42Config) -> int:
    """2DI + I² + I, and I (K + 1) for the convolution."""
    inner = config.inner_width(dim)
    return config.wrapper_params(dim, gated=False) + inner * inner + inner


def validate(dim: int, config: E42Config) -> None:
    """Raises `ConfigError` for a width without inner channels."""
    config.validate_width(dim)
