"""Vector-state mixers around one square recurrent matrix. T time, B batch, I inner width (d of the equations)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elman_core.kernels import DenseKernel
from elman_core.registry import State, option

from .init import orthogonal_, s4d_, xavier_uniform_
from .linear import is_bare
from .spectral import SpectralNorm
from .wrapper import WrapperConfig, WrapperMixer


@dataclass(frozen=True)
class RecurrentMatrixConfig(WrapperConfig):
    """Options of a square recurrent matrix W, beside those of the wrapper."""

    r_h_mode: Literal["spectral_norm", "none"] = option("spectral_norm", "what bounds the recurrent matrix W")
    spectral_radius: float = option(0.99, "largest singular value of W under spectral_norm", gt=0.0, le=2.0)
    r_h_init_gain: float = option(0.1, "Xavier gain of W at the start", gt=0.0, le=10.0)
    mamba2_init: bool | Literal["s4d"] = option(  # type: ignore[assignment]  # one choice more than the wrapper's
        False, "projections from N(0, 0.02²) and W orthogonal; 's4d': W symmetric with eigenvalues 0.99 to 0.9999"
    )


class DenseMixer(WrapperMixer):
    """A wrapper around h_t = cell(W h_{t-1} + u_t, …), W square: parameters, spectral norm, initialisation, and the calls.

    A subclass names the kernel and says where u comes from. State: h (B, I), zeros at the start.

    Attributes:
        kernel: the recurrence. If the wrapper is `gated`, the cell reads z beside u.
        matrix: the name of W's parameter.
        input: "projected" u = W_x x + b, with the module `w_x`; "tied" u = W x + b, with the parameter `b` and the same W;
            "plain" u = x.
    """

    kernel: ClassVar[DenseKernel]
    matrix: ClassVar[str] = "w_h"
    input: ClassVar[Literal["projected", "tied", "plain"]] = "projected"
    fp32_params = ("spectral.u", "spectral.v")
    config: RecurrentMatrixConfig

    def build_cell(self, inner: int) -> None:
        if self.input == "projected":
            self.w_x = nn.Linear(inner, inner)
        self.register_parameter(self.matrix, nn.Parameter(torch.empty(inner, inner)))
        if self.input == "tied":
            self.b = nn.Parameter(torch.empty(inner))
        spectral = self.config.r_h_mode == "spectral_norm"
        self.spectral = SpectralNorm(inner, self.config.spectral_radius) if spectral else None

    @classmethod
    def cell_params(cls, inner: int, config: RecurrentMatrixConfig) -> int:
        square = inner * inner
        return square + {"projected": square + inner, "tied": inner, "plain": 0}[cls.input]

    def effective(self) -> Tensor:
        """The W of the recurrence: with its largest singular value as asked."""
        w = getattr(self, self.matrix)
        return w if self.spectral is None else self.spectral(w)

    def cell(
        self, x_TBI: Tensor, z_TBI: Tensor | None, state: State | None, *flags_TB: Tensor | None
    ) -> tuple[Tensor, State]:
        extras = () if z_TBI is None else (z_TBI,)
        w, h_BI = self.effective(), self.vector(state, "h", x_TBI)
        step = self.kernel.step
        known = self.input == "tied" or (self.input == "projected" and is_bare(self.w_x))
        if known and step is not None and step.takes(x_TBI, w, *flags_TB):  # decoding: one launch
            v, b = (w, self.b) if self.input == "tied" else (self.w_x.weight, self.w_x.bias)
            y_TBI, h_BI = step(x_TBI, v, b, *extras, w, h_BI)
            return y_TBI, {"h": h_BI}
        if self.input == "projected":
            u_TBI = self.w_x(x_TBI)
        else:
            u_TBI = F.linear(x_TBI, w, self.b) if self.input == "tied" else x_TBI
        y_TBI, h_BI = self.kernel(u_TBI, *extras, w, h_BI, *flags_TB)
        return y_TBI, {"h": h_BI}

    def cell_of_silu(self, u_TBI: Tensor, *rest: Any) -> tuple[Tensor, State]:
        tied = self.kernel.tied
        if tied is None or u_TBI.shape[0] == 1:  # a single step has a launch of its own
            return self.cell(F.silu(u_TBI), *rest)
        z_TBI, state, *flags = rest
        extras = () if z_TBI is None else (z_TBI,)
        y_TBI, h_BI = tied(u_TBI, *extras, self.effective(), self.b, self.vector(state, "h", u_TBI), *flags)
        return y_TBI, {"h": h_BI}

    def backend(self) -> str:
        runs = self.kernel.tied or self.kernel
        return runs.backend(self.out_proj.weight.device, self.inner)

    def reset_cell(self) -> None:
        init, w = self.config.mamba2_init, getattr(self, self.matrix)
        if self.input == "tied":
            nn.init.zeros_(self.b)
        elif self.input == "projected":
            nn.init.zeros_(self.w_x.bias)
            if init:
                nn.init.normal_(self.w_x.weight, std=0.02)
            else:
                xavier_uniform_(self.w_x.weight)
        if init == "s4d":
            s4d_(w)
        elif init:
            orthogonal_(w, 0.999)
        else:
            xavier_uniform_(w, self.config.r_h_init_gain)
        if self.spectral is not None:
            self.spectral.reset()
