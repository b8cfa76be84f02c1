"""The Mamba-2 mixer: parameters, initialisation, and which code runs.

B batch, T time, D model width, I inner width, C = I + 2 N channels of x, B and C, H heads, P width of a head, N of the state.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elman_core import ConfigError, Mixer, State
from elman_core.nn import CausalConv, RMSNorm, aligned, compute_dtype, linear, mamba_decay_, without_autocast
from elman_core.registry import StateSpec

from . import op
from .config import Mamba2Config
from .reference import ssd_chunked


def need_whole_inner(dim: int, expand: float, headdim: int) -> None:
    """Raises `ConfigError` unless the inner width, dim x expand, is a whole number of heads."""
    wide = dim * expand
    if wide != int(wide) or wide % headdim or not wide:
        near = max(1, round(wide / headdim)) * headdim
        raise ConfigError(
            f"width {dim} x expand {expand:g} = {wide:g}, which must be a multiple of headdim {headdim}; nearest: {near}"
        )


@torch.no_grad()
def start_projections_(in_proj: nn.Linear, out_proj: nn.Linear, depth: int) -> None:
    """Both as nn.Linear starts; out_proj then divided by the square root of `depth`, the number of layers, unless it is 0."""
    for projection in (in_proj, out_proj):
        bound = 1 / math.sqrt(projection.in_features)
        nn.init.uniform_(projection.weight, -bound, bound)
    if depth:
        out_proj.weight.div_(math.sqrt(depth))


class Mamba2(Mixer):
    """Parameters, with mamba_ssm's names and shapes: in_proj (2 I + 2 N + H, D), rows z, x, B, C, dt; conv1d.weight (C, 1, K),
    conv1d.bias (C); dt_bias, A_log, D (H); norm.weight (I); out_proj (D, I).

    State: conv (B, K - 1, C), the last inputs of the convolution, and ssm (B, H, P, N).

    On a GPU mamba_ssm's kernels run, with causal_conv1d if that is installed too; elsewhere, in float64 and for the gradient of
    one step, plain PyTorch in chunks. Masked positions have Δ = 0, which holds the state exactly.
    """

    fp32_params = ("A_log", "dt_bias", "D")
    config: Mamba2Config

    def __init__(self, dim: int, config: Mamba2Config, layer_idx: int = 0) -> None:
        super().__init__(dim, config, layer_idx)
        self.inner, self.heads = config.inner(dim), config.heads(dim)
        channels = config.convolved(dim)
        self.in_proj = nn.Linear(dim, self.inner + channels + self.heads, bias=False)
        self.conv1d = CausalConv(channels, config.d_conv, dim=1)
        self.dt_bias = nn.Parameter(torch.empty(self.heads))
        self.A_log = nn.Parameter(torch.empty(self.heads))
        self.D = nn.Parameter(torch.empty(self.heads))
        self.norm = RMSNorm(self.inner)
        self.out_proj = nn.Linear(self.inner, dim, bias=False)
        self.reset_parameters()

    def stacked(self) -> dict[str, tuple[int, ...]]:
        n = self.config.d_state
        return {"in_proj.weight": (self.inner, self.inner, n, n, self.heads)}  # of z, x, B, C, Δ

    @torch.no_grad()
    def reset_parameters(self) -> None:
        start_projections_(self.in_proj, self.out_proj, self.config.init_depth)
        self.conv1d.reset_parameters()
        mamba_decay_(self.A_log, self.dt_bias, a_min=1.0)
        nn.init.ones_(self.D)
        self.norm.reset_parameters()

    def forward(
        self,
        x_BTD: Tensor,
        state: State | None = None,
        mask_BT: Tensor | None = None,
        starts_BT: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        widths = (self.inner, self.config.convolved(self.dim), self.heads)
        projected = aligned(self.in_proj, x_BTD)  # with zeros behind dt: rows of 28 heads would begin anywhere
        one = x_BTD.shape[1] == 1
        kernels = None if one and torch.is_grad_enabled() else op.kernels(projected)
        found, stepping = (None, kernels) if one else (kernels, None)
        a_H = -torch.exp(self.A_log.to(compute_dtype(self.A_log)))
        if found is not None and found.whole is not None and state is None and mask_BT is None:
            exact = projected[..., : sum(widths)]
            layer = self.conv1d, self.dt_bias, a_H, self.D, self.norm, self.config.headdim
            y_BTI, ssm = op.whole(found, exact, *layer, starts_BT)
            return self.out_proj(y_BTI), {"conv": self._window(projected, starts_BT), "ssm": ssm}
        z_BTI, xbc_BTC, dt_BTH, _ = projected.split((*widths, projected.shape[-1] - sum(widths)), -1)
        if found is not None and found.conv is not None and state is mask_BT is starts_BT is None:
            xbc_BTC, window = op.convolve(found, xbc_BTC, self.conv1d), self._window(projected)
        else:
            y_BTC, window = self.conv1d(xbc_BTC, None if state is None else state["conv"], mask_BT, starts_BT)
            xbc_BTC = F.silu(y_BTC)
            if mask_BT is not None:  # a step of 0 alone would pass NaN on
                xbc_BTC = torch.where(mask_BT[..., None], xbc_BTC, 0)
        x_BTI, b_BTN, c_BTN = xbc_BTC.split((self.inner, self.config.d_state, self.config.d_state), -1)
        if stepping is not None:
            y_BTI, ssm = self._step(stepping, x_BTI, dt_BTH, a_H, b_BTN, c_BTN, state, mask_BT, starts_BT)
            return linear(self.out_proj, self._gated(y_BTI, z_BTI, stepping)), {"conv": window, "ssm": ssm}
        dtype = compute_dtype(dt_BTH, self.dt_bias)
        with without_autocast(dt_BTH):
            dt_BTH = -F.logsigmoid(-(dt_BTH.to(dtype) + self.dt_bias.to(dtype)))  # softplus; see `mamba_decay`
        if mask_BT is not None:
            dt_BTH = torch.where(mask_BT[..., None], dt_BTH, 0)
        inputs = (x_BTI.unflatten(-1, (self.heads, -1)), dt_BTH, a_H, b_BTN, c_BTN, self.D)
        then = None if state is None else state["ssm"], starts_BT
        y_BTHP, ssm = ssd_chunked(*inputs, *then) if found is None else op.scan(found, *inputs, *then)
        return linear(self.out_proj, self._gated(y_BTHP.flatten(2), z_BTI, found)), {"conv": window, "ssm": ssm}

    def _step(
        self, found: op.Kernels, x_BTI: Tensor, dt_BTH: Tensor, a_H: Tensor, b_BTN: Tensor, c_BTN: Tensor,
        state: State | None, mask_BT: Tensor | None, starts_BT: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """y (B, 1, I) and the state after one step, by mamba_ssm."""
        heads = self.heads, self.config.headdim
        before = a_H.new_zeros(len(x_BTI), *heads, self.config.d_state) if state is None else state["ssm"]
        if mask_BT is not None:
            dt_BTH = dt_BTH.masked_fill(~mask_BT[..., None], -math.inf)  # of which softplus is 0
        if starts_BT is not None:
            before = before.masked_fill(starts_BT[..., None, None], 0)
        given = (x_BTI[:, 0].unflatten(-1, heads), dt_BTH[:, 0], self.dt_bias, a_H, b_BTN[:, 0], c_BTN[:, 0], self.D)
        y_BHP, end = op.step(found, *given, before)
        return y_BHP.flatten(1)[:, None], end

    def _gated(self, y_BTI: Tensor, z_BTI: Tensor, found: op.Kernels | None) -> Tensor:
        """RMSNorm(y ⊙ silu(z)), in the dtype of z."""
        if found is not None:
            return op.gated_norm(found, y_BTI, z_BTI, self.norm)
        full = compute_dtype(y_BTI)
        return self.norm(y_BTI.to(full) * F.silu(z_BTI.to(full))).to(z_BTI.dtype)

    def _window(self, projected: Tensor, starts_BT: Tensor | None = None) -> Tensor:
        """The convolution's window after a sequence that began with an empty one, without inputs of documents that ended."""
        keep = self.config.d_conv - 1
        last = projected[:, -keep:, self.inner : self.inner + self.config.convolved(self.dim)]
        if starts_BT is not None:
            ahead_BT = (
                starts_BT[:, -keep:].flip(1).cumsum(1).flip(1) - starts_BT[:, -keep:].long()
            )  # starts behind each
            last = last.masked_fill(ahead_BT[..., None] > 0, 0)
        return F.pad(last, (0, 0, keep - last.shape[1], 0)).to(compute_dtype(last))

    @classmethod
    def validate(cls, dim: int, config: Mamba2Config) -> None:
        """Raises `ConfigError` unless the inner width is a whole number of heads."""
        need_whole_inner(dim, config.expand, config.headdim)

    @classmethod
    def state_spec(cls, dim: int, config: Mamba2Config) -> StateSpec:
        return {
            "conv": ((config.d_conv - 1, config.convolved(dim)), torch.float32),
            "ssm": ((config.heads(dim), config.headdim, config.d_state), torch.float32),
        }

    def backend(self) -> str:
        found = op.kernels(self.out_proj.weight)
        if found is None:
            return "torch"
        if found.whole is not None:
            return "mamba_ssm and causal_conv1d"
        return "mamba_ssm" if found.conv is None else "mamba_ssm and fla's convolution"
