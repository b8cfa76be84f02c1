"""Vector-state mixers around one square recurrent matrix. T time, B batch, I inner width (d of the equations)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from elman_core.kernels import DenseKernel
from elman_core.registry import State, option

from .computed import LowRank
from .init import orthogonal_, s4d_, xavier_uniform_
from .linear import is_bare, linear
from .spectral import SpectralNorm
from .wrapper import WrapperConfig, WrapperMixer


@dataclass(frozen=True)
class RecurrentMatrixConfig(WrapperConfig):
    """Options of a square recurrent matrix W, in addition to those of the wrapper."""

    r_h_mode: Literal["spectral_norm", "none"] = option("spectral_norm", "what bounds the recurrent matrix W")
    spectral_radius: float = option(0.99, "largest singular value of W under spectral_norm", gt=0.0, le=2.0)
    r_h_init_gain: float = option(0.1, "Xavier gain of W at the start", gt=0.0, le=10.0)
    mamba2_init: bool | Literal["s4d"] = option(  # type: ignore[assignment]  # one choice more than the wrapper's
        False, "projections from N(0, 0.02²) and W orthogonal; 's4d': W symmetric with eigenvalues 0.99 to 0.9999"
    )


class DenseMixer(WrapperMixer):
    """A wrapper around h_t = cell(W h_{t-1} + u_t, …), W square: parameters, spectral norm, initialisation, and the calls.

    A subclass names the kernel and says where u comes from. If W is not that of `RecurrentMatrixConfig`, the config inherits
    from `WrapperConfig` only: then there is no spectral norm, and `reset_matrix` draws W. State: h (B, I), zeros at the start.

    Attributes:
        kernel: the recurrence; `build_cell` may choose another one by the options. `extras` returns the cell's inputs beside u.
        matrix: the name of W's parameter, or of the `LowRank` whose parameters are NAME.u and NAME.v, where `rank` gives one.
        input: "projected" u = W_x x + b, with the module `w_x`; "tied" u = W x + b, with the parameter `b` and the same W;
            "plain" u = x.
        orthogonal, s4d: with `mamba2_init`, the size of an orthogonal W, or the eigenvalues of a symmetric one.
    """

    kernel: DenseKernel
    matrix: ClassVar[str] = "w_h"
    input: ClassVar[Literal["projected", "tied", "plain"]] = "projected"
    orthogonal: ClassVar[float] = 0.999
    s4d: ClassVar[tuple[float, float]] = (0.99, 0.9999)
    fp32_params = ("spectral.u", "spectral.v")
    config: RecurrentMatrixConfig
    b: Tensor | None

    def build_cell(self, inner: int) -> None:
        if self.input == "projected":
            self.w_x = nn.Linear(inner, inner)
        rank = self.rank(self.dim, self.config)
        w = nn.Parameter(torch.empty(inner, inner)) if rank is None else LowRank(inner, rank)
        setattr(self, self.matrix, w)
        self.register_parameter("b", nn.Parameter(torch.empty(inner)) if self.input == "tied" else None)
        spectral = getattr(self.config, "r_h_mode", "none") == "spectral_norm"
        self.spectral = SpectralNorm(inner, self.config.spectral_radius) if spectral else None

    @classmethod
    def rank(cls, dim: int, config: Any) -> int | None:
        """The rank of W = U V, for D = dim; None for a full W."""
        return None

    def effective(self) -> Tensor:
        """The W of the recurrence, scaled to the requested largest singular value."""
        w = getattr(self, self.matrix)
        own = w.u if isinstance(w, LowRank) else w  # or an adapter; one of a parameter is a parametrization
        trained = isinstance(own, Tensor) and own.requires_grad and not is_parametrized(self, self.matrix)
        w = w(None) if isinstance(w, nn.Module) else w  # a LowRank, or an adapter around one
        return w if self.spectral is None else self.spectral(w, trained=trained)

    def extras(self, x_TBI: Tensor, z_TBI: Tensor | None) -> tuple[Tensor, ...]:
        """The cell's inputs beside u, (T, B, I) each: z of a `gated` wrapper unless overridden."""
        return () if z_TBI is None else (z_TBI,)

    def projection(self, w_II: Tensor) -> tuple[Tensor | None, Tensor | None] | None:
        """(V, b) for u = V x + b, V being W if tied, or (None, b) for u = x + b; None if an adapter replaces `w_x`."""
        if self.input == "projected":
            return (self.w_x.weight, self.w_x.bias) if is_bare(self.w_x) else None
        return w_II if self.input == "tied" else None, self.b

    def cell(self, x_TBI: Tensor, *rest: Any) -> tuple[Tensor, State]:
        return self._recurrence(x_TBI, *rest)

    def cell_of_silu(self, u_TBI: Tensor, *rest: Any) -> tuple[Tensor, State]:
        own = type(self)  # whose extras may be made of silu(u)
        if self.input != "tied" or own.extras is not DenseMixer.extras or own.cell is not DenseMixer.cell:
            return self.cell(F.silu(u_TBI), *rest)
        return self._recurrence(u_TBI, *rest, silu=True)

    def _recurrence(
        self, x_TBI: Tensor, z_TBI: Tensor | None, state: State | None, *flags_TB: Tensor | None, silu: bool = False
    ) -> tuple[Tensor, State]:
        w = self.effective()
        rest = (*self.extras(x_TBI, z_TBI), w, self.vector(state, "h", x_TBI), *flags_TB)
        if (projection := self.projection(w)) is None:
            y_TBI, h_BI = self.kernel(linear(self.w_x, x_TBI, self.time), *rest)
        else:
            v, b = projection
            y_TBI, h_BI = self.kernel(x_TBI, *rest, v=v, b=b, silu=silu)
        return y_TBI, {"h": h_BI}

    def backend(self) -> str:
        return self.kernel.backend(self.out_proj.weight.device, self.inner)

    def reset_cell(self) -> None:
        if self.b is not None:
            nn.init.zeros_(self.b)
        if self.input == "projected":
            nn.init.zeros_(self.w_x.bias)
            if isinstance(self.config, RecurrentMatrixConfig) and self.config.mamba2_init:
                nn.init.normal_(self.w_x.weight, std=0.02)
            else:
                xavier_uniform_(self.w_x.weight)
        self.reset_matrix(getattr(self, self.matrix))
        if self.spectral is not None:
            self.spectral.reset()

    def reset_matrix(self, w: Any) -> None:
        """Draw W, a parameter or a `LowRank`."""
        init = self.config.mamba2_init
        if init == "s4d":
            s4d_(w, *self.s4d)
        elif init:
            orthogonal_(w, self.orthogonal)
        else:
            xavier_uniform_(w, self.config.r_h_init_gain)


class InputGatedMixer(DenseMixer):
    """A `DenseMixer` without a SiLU in front of the cell, whose cell reads the gate input m = x + b_g, or m = W_g x + b_g where
    the option `gate` is "projected". With `use_conv`, a SiLU follows the convolution.

    Parameters: b_g (I), or w_g.weight (I, I) and w_g.bias (I) for W_g and b_g.
    """

    config: Any
    b_g: Tensor

    def build_cell(self, inner: int) -> None:
        super().build_cell(inner)
        self.pre_silu = self.config.use_conv
        self.w_g = nn.Linear(inner, inner) if self.config.gate == "projected" else None
        self.register_parameter("b_g", None if self.w_g else nn.Parameter(torch.empty(inner)))

    def extras(self, x_TBI: Tensor, z_TBI: Tensor | None) -> tuple[Tensor, ...]:
        return (x_TBI + self.b_g.to(x_TBI.dtype) if self.w_g is None else linear(self.w_g, x_TBI, self.time),)

    def reset_cell(self) -> None:
        super().reset_cell()
        if self.w_g is not None:
            xavier_uniform_(self.w_g.weight)
        nn.init.zeros_(self.b_g if self.w_g is None else self.w_g.bias)
