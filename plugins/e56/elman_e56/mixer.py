"""The E56 mixer: its options and parameters. B batch, I inner width."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from elman_core import option
from elman_core.nn import ComputedWeight, DenseMixer, WrapperConfig, orthogonal_, s4d_, xavier_uniform_

from .op import e56


@dataclass(frozen=True)
class E56Config(WrapperConfig):
    """There is no spectral norm: W is free."""

    mamba2_init: bool | Literal["s4d"] = option(  # type: ignore[assignment]  # one choice more than the wrapper's
        False, "projections and the left half of W from N(0, 0.02²), the right half orthogonal, or symmetric for 's4d'"
    )


class Halves(ComputedWeight):
    """[W_x, W_h] (2, I, I) of W (I, 2I), each contiguous, as kernels read them."""

    def compute(self, w: Tensor) -> Tensor:  # type: ignore[override]
        return torch.stack(w.chunk(2, 1))


class E56Mixer(DenseMixer):
    """x → [u, z] → silu(u) → h_t = tanh(W [u_t; h_{t-1}] + b) → h_t silu(z_t) → out.

    The cell's parameters: w (I, 2I) is W, its left half for the input, b (I). State: h (B, I).
    """

    kernel = e56
    gated = True
    input = "tied"  # the projection is no module of its own: it comes from W

    def build_cell(self, inner: int) -> None:
        self.w, self.halves = nn.Parameter(torch.empty(inner, 2 * inner)), Halves()
        self.b, self.spectral = nn.Parameter(torch.empty(inner)), None

    def effective(self) -> Tensor:
        return self.halves(self.w)[1]

    def projection(self, w_II: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.halves(self.w)[0], self.b

    def reset_cell(self) -> None:
        assert self.b is not None
        nn.init.zeros_(self.b)
        init = self.config.mamba2_init
        if not init:
            xavier_uniform_(self.w)
            return
        nn.init.normal_(self.w, std=0.02)
        right = torch.empty_like(self.w[:, self.inner :])
        self.w[:, self.inner :] = s4d_(right) if init == "s4d" else orthogonal_(right, 0.999)
