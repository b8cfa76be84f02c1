"""The E1 mixer: its options, parameters and initialisation. T time, B batch, I inner width (d of the equations)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from elman_core import State, option
from elman_core.nn import SpectralNorm, WrapperConfig, WrapperMixer, is_bare, orthogonal_, s4d_, xavier_uniform_

from .op import dense, e1, one_step


@dataclass(frozen=True)
class E1Config(WrapperConfig):
    """Options of E1, beside those of the wrapper."""

    r_h_mode: Literal["spectral_norm", "none"] = option("spectral_norm", "what bounds the recurrent matrix W_h")
    spectral_radius: float = option(0.99, "largest singular value of W_h under spectral_norm", gt=0.0, le=2.0)
    r_h_init_gain: float = option(0.1, "Xavier gain of W_h at the start", gt=0.0, le=10.0)


class E1Mixer(WrapperMixer):
    """x → [u, z] → silu(u) → h_t = tanh(W_x u_t + W_h h_{t-1} + b) → h_t silu(z_t) → out.

    Parameters: in_proj.weight (2I, D), w_x.weight (I, I), w_x.bias (I), w_h (I, I), out_proj.weight (D, I), and
    conv.weight (I, 1, K), conv.bias (I) with `use_conv`. State: h (B, I) and, with `use_conv`, conv (B, K - 1, I).
    """

    gated = True
    fp32_params = ("spectral.u", "spectral.v")
    config: E1Config

    def build_cell(self, inner: int) -> None:
        self.w_x = nn.Linear(inner, inner)
        self.w_h = nn.Parameter(torch.empty(inner, inner))
        spectral = self.config.r_h_mode == "spectral_norm"
        self.spectral = SpectralNorm(inner, self.config.spectral_radius) if spectral else None

    def cell(
        self, x_TBI: Tensor, z_TBI: Tensor | None, state: State | None, mask_TB: Tensor | None
    ) -> tuple[Tensor, State]:
        assert z_TBI is not None
        w_h = self.w_h if self.spectral is None else self.spectral(self.w_h)
        h_BI, w_x = self.vector(state, "h", x_TBI), self.w_x
        if is_bare(w_x) and one_step.takes(x_TBI, w_h, mask_TB):  # decoding: one launch
            y_TBI, h_BI = one_step(x_TBI, w_x.weight, w_x.bias, z_TBI, w_h, h_BI)
        else:
            y_TBI, h_BI = e1(w_x(x_TBI), z_TBI, w_h, h_BI, mask_TB)
        return y_TBI, {"h": h_BI}

    def backend(self) -> str:
        return dense.backend(self.w_h.device, self.inner)

    def reset_cell(self) -> None:
        init = self.config.mamba2_init
        nn.init.zeros_(self.w_x.bias)
        if init:
            nn.init.normal_(self.w_x.weight, std=0.02)
        else:
            xavier_uniform_(self.w_x.weight)
        if init == "s4d":
            s4d_(self.w_h)
        elif init:
            orthogonal_(self.w_h, 0.999)
        else:
            xavier_uniform_(self.w_h, self.config.r_h_init_gain)
        if self.spectral is not None:
            self.spectral.reset()


def param_count(dim: int, config: E1Config) -> int:
    """3DI + 2I² + I, and I (K + 1) for the convolution."""
    inner = config.inner_width(dim)
    return config.wrapper_params(dim, gated=True) + 2 * inner * inner + inner


def validate(dim: int, config: E1Config) -> None:
    """Raises `ConfigError` for a width without inner channels."""
    config.validate_width(dim)
