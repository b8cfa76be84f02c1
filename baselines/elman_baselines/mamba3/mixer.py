"""The Mamba-3 mixer: parameters, initialisation, and which code runs.

B batch, T time, D model width, I inner width, H heads, P width of a head, N of the state, R angles of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elman_baselines.gdn.mixer import GONE
from elman_baselines.mamba2.mixer import need_whole_inner, start_projections_
from elman_core import Mixer, State, option
from elman_core.nn import RMSNorm, aligned, compute_dtype, linear, mamba_decay_, without_autocast
from elman_core.registry import StateSpec

from . import op

LEAST = 1e-4
"""The smallest rate of decay."""


@dataclass(frozen=True)
class Mamba3Config:
    d_state: int = option(
        128, "width N of B and C, the rows of a head's state; kernels take up to 128", ge=4, le=256, multiple_of=4
    )
    expand: float = option(2.0, "inner width / model width", gt=0, le=16)
    headdim: int = option(64, "width P of a head, the columns of its state; it divides the inner width", ge=1, le=256)
    rope_fraction: float = option(0.5, "share of the channels of B and C that turn", gt=0, le=1)
    init_depth: int = option(0, "out_proj starts divided by the square root of it, the number of layers; 0: not", ge=0)

    def inner(self, dim: int) -> int:
        """I, the width of x, z and y."""
        return int(dim * self.expand)

    def heads(self, dim: int) -> int:
        """H."""
        return self.inner(dim) // self.headdim

    def angles(self) -> int:
        """R, at least 1."""
        return max(1, int(self.d_state * self.rope_fraction) // 2)


class Mamba3(Mixer):
    """Parameters, with mamba_ssm's names and shapes: in_proj (2 I + 2 N + 3 H + R, D), rows z, x, B, C, dt, a, λ, θ; dt_bias,
    D (H); B_bias, C_bias (H, 1, N); B_norm.weight, C_norm.weight (N); out_proj (D, I).

    State: angle (B, H, R), from -π to π, S (B, H, N, P), and shift (B, 1, H N + I), the last k and x.

    On a GPU mamba_ssm's kernel runs in bfloat16, for whole rows that begin without a state, with α = 0 where a document begins;
    elsewhere kernels of elman-csrc or plain PyTorch.
    """

    fp32_params = ("dt_bias", "D", "B_bias", "C_bias")
    config: Mamba3Config

    def __init__(self, dim: int, config: Mamba3Config, layer_idx: int = 0) -> None:
        super().__init__(dim, config, layer_idx)
        self.inner, self.heads, n = config.inner(dim), config.heads(dim), config.d_state
        self.widths = (self.inner, self.inner, n, n, self.heads, self.heads, self.heads, config.angles())
        self.in_proj = nn.Linear(dim, sum(self.widths), bias=False)
        self.dt_bias, self.D = (nn.Parameter(torch.empty(self.heads)) for _ in range(2))
        self.B_bias, self.C_bias = (nn.Parameter(torch.empty(self.heads, 1, n)) for _ in range(2))
        self.B_norm, self.C_norm = RMSNorm(n), RMSNorm(n)
        self.out_proj = nn.Linear(self.inner, dim, bias=False)
        self.reset_parameters()

    def stacked(self) -> dict[str, tuple[int, ...]]:
        return {"in_proj.weight": self.widths}

    @torch.no_grad()
    def reset_parameters(self) -> None:
        start_projections_(self.in_proj, self.out_proj, self.config.init_depth)
        mamba_decay_(torch.empty_like(self.dt_bias), self.dt_bias)
        for ones in (self.D, self.B_bias, self.C_bias):
            nn.init.ones_(ones)
        for norm in (self.B_norm, self.C_norm):
            norm.reset_parameters()

    def forward(
        self,
        x_BTD: Tensor,
        state: State | None = None,
        mask_BT: Tensor | None = None,
        starts_BT: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        projected = aligned(self.in_proj, x_BTD)
        found = None
        if state is mask_BT is None and x_BTD.shape[1] > 1:
            found = self._library(projected)
        z, x, b, c, *rest, _ = projected.split((*self.widths, projected.shape[-1] - sum(self.widths)), -1)
        z_BTHP, x_BTHP = (y.unflatten(-1, (self.heads, -1)) for y in (z, x))
        wide = compute_dtype(projected)
        with without_autocast(projected):
            dt, a, trap, theta = (y.to(wide) for y in rest)
            dt = -F.logsigmoid(-(dt + self.dt_bias.to(wide)))  # softplus; see `mamba_decay`
            log = F.logsigmoid(-a).clamp(max=-LEAST) * dt
            keys = self.B_norm(b), self.C_norm(c)
            biases = self.B_bias.to(wide).squeeze(1), self.C_bias.to(wide).squeeze(1)
            d_H = self.D.to(wide)

            def turn() -> Tensor:
                return math.pi * theta.tanh()[:, :, None] * dt[..., None]

            if found is not None:
                if starts_BT is not None:  # the share of the input before has the factor α too
                    log = log.masked_fill(starts_BT[..., None], GONE)
                y_BTHP, end = op.library_scan(found, keys, biases, x_BTHP, z_BTHP, (dt, log, trap), theta, d_H)
                if starts_BT is not None:
                    end = op.from_last_start(end, turn(), starts_BT)
            else:
                before = None if state is None else (state["angle"], state["S"], state["shift"])
                rates = dt, log, F.logsigmoid(trap).exp()
                o_BTHP, end = op.scan(keys, biases, x_BTHP, rates, turn(), before, mask_BT, starts_BT)
                y_BTHP = (o_BTHP.to(wide) + d_H[:, None] * x_BTHP.to(wide)) * F.silu(z_BTHP.to(wide))
        y_BTD = linear(self.out_proj, y_BTHP.flatten(2).to(z.dtype))
        return y_BTD, dict(zip(("angle", "S", "shift"), end, strict=True))

    def _library(self, x: Tensor) -> object | None:
        return op.kernels(x, self.config.d_state, self.config.headdim, self.config.angles())

    @classmethod
    def validate(cls, dim: int, config: Mamba3Config) -> None:
        """Raises `ConfigError` unless the inner width is a whole number of heads."""
        need_whole_inner(dim, config.expand, config.headdim)

    @classmethod
    def state_spec(cls, dim: int, config: Mamba3Config) -> StateSpec:
        heads, n = config.heads(dim), config.d_state
        shapes = {"angle": (heads, config.angles()), "S": (heads, n, config.headdim)}
        shapes["shift"] = (1, heads * (n + config.headdim))
        return {name: (shape, torch.float32) for name, shape in shapes.items()}

    def backend(self) -> str:
        weight = self.out_proj.weight
        own = op.trapezoid.backend(weight.device, self.config.d_state, self.config.headdim)
        found = self._library(weight.new_empty(0, dtype=torch.bfloat16))  # as under autocast
        return own if found is None else f"mamba_ssm in bfloat16, else {own}"
