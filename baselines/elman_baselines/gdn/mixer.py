"""The Gated DeltaNet mixer: parameters, initialisation, and which code runs.

B batch, T time, D model width, C channels, H heads, K width of a key, V of a value.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elman_baselines.heads import need_whole_heads
from elman_baselines.library import fla_runs
from elman_core import ConfigError, Mixer, State
from elman_core.nn import (
    CausalConv,
    ComputedWeight,
    RMSNorm,
    causal_conv,
    compute_dtype,
    is_unhooked,
    l2_normalize,
    linear,
    linears,
    mamba_decay_,
    without_autocast,
)
from elman_core.registry import StateSpec

from . import op
from .config import GDNConfig
from .reference import delta_rule_chunked

L2_EPS = 1e-6
"""Under the root of q's and k's length, as in fla."""
GONE = -150.0
"""log α where a document begins: its exponential is 0 in float32, and sums of a chunk lose no more than 1e-5 each."""


class Joined(ComputedWeight):
    """The taps of several convolutions as one, (C, K)."""

    def compute(self, *weights: Tensor) -> Tensor:  # type: ignore[override]
        return torch.cat(weights).squeeze(1).to(compute_dtype(weights[0]))


class GatedDeltaNet(Mixer):
    """Parameters, with fla's names and shapes: q_proj, k_proj (H K, D), v_proj, g_proj (H V, D), a_proj, b_proj (H, D),
    q_conv1d, k_conv1d (H K, 1, d_conv), v_conv1d (H V, 1, d_conv), A_log, dt_bias (H), o_norm (V), o_proj (D, H V).

    State: conv (B, d_conv - 1, 2 H K + H V), the last inputs of the three convolutions side by side, and S (B, H, K, V).

    On a GPU fla's kernels run behind `CausalConv`'s, also for a step of one byte without gradients; elsewhere and in float64,
    the rule is plain PyTorch in chunks. Masked positions have α = 1 and β = 0, which holds the state exactly. For fla, α is 0
    where a document begins: its `cu_seqlens` take one row, and are read on the host, which a CUDA graph cannot do.
    """

    fp32_params = ("A_log", "dt_bias")
    a_min = 0.0
    config: GDNConfig

    def __init__(self, dim: int, config: GDNConfig, layer_idx: int = 0) -> None:
        super().__init__(dim, config, layer_idx)
        self.heads = config.heads(dim)
        self.keys, self.values = self.heads * config.head_dim, self.heads * config.values
        self.q_proj = nn.Linear(dim, self.keys, bias=False)
        self.k_proj = nn.Linear(dim, self.keys, bias=False)
        self.v_proj = nn.Linear(dim, self.values, bias=False)
        decays = self.make_gates(dim)
        self.q_conv1d = CausalConv(self.keys, config.d_conv, bias=False, dim=1, silu=True)
        self.k_conv1d = CausalConv(self.keys, config.d_conv, bias=False, dim=1, silu=True)
        self.v_conv1d = CausalConv(self.values, config.d_conv, bias=False, dim=1, silu=True)
        self.taps = Joined()
        self.A_log = nn.Parameter(torch.empty(self.heads))
        self.dt_bias = nn.Parameter(torch.empty(decays))
        self.o_norm = RMSNorm(config.values)
        self.o_proj = nn.Linear(self.values, dim, bias=False)
        self.reset_parameters()

    def make_gates(self, dim: int) -> int:
        """The maps of the output gate, the decay and β; returns the number of decays of a step."""
        self.g_proj: nn.Module = nn.Linear(dim, self.values, bias=False)
        self.a_proj = nn.Linear(dim, self.heads, bias=False)
        self.b_proj = nn.Linear(dim, self.heads, bias=False)
        return self.heads

    @torch.no_grad()
    def reset_parameters(self) -> None:
        init = self.config.init
        for module in self.modules():
            if isinstance(module, RMSNorm):
                module.reset_parameters()
            elif init != "linear" and isinstance(module, (nn.Linear, CausalConv)):
                nn.init.normal_(module.weight, std=0.0 if init == "zero" and module is self.o_proj else 0.02)
            elif isinstance(module, CausalConv):
                module.reset_parameters()
            elif isinstance(module, nn.Linear):
                bound = 1 / math.sqrt(module.in_features)
                nn.init.uniform_(module.weight, -bound, bound)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        mamba_decay_(self.A_log, self.dt_bias, a_min=self.a_min)

    def forward(
        self,
        x_BTD: Tensor,
        state: State | None = None,
        mask_BT: Tensor | None = None,
        starts_BT: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        found = op.kernels(x_BTD, self.config.head_dim) if fla_runs(x_BTD) else None
        maps = (self.q_proj, self.k_proj, self.v_proj, self.g_proj, self.a_proj, self.b_proj)
        *qkv, g_BTC, a_BTH, b_BTH = linears(maps, x_BTD)
        (q, k, v), window = self.convolved(qkv, state, mask_BT, starts_BT)
        if mask_BT is not None:  # rates of 0 alone would pass NaN on
            q, k, v = (torch.where(mask_BT[..., None, None], p, 0) for p in (q, k, v))
        raw = a_BTH, b_BTH
        start = None if state is None else state["S"]
        g_BTHV = g_BTC.unflatten(-1, (self.heads, -1))
        if found is not None:
            if mask_BT is starts_BT is None and not self.config.allow_neg_eigval:
                o_BTHV, end = op.rule(found, q, k, v, raw, start, (self.A_log, self.dt_bias))
            else:
                log_BTH, beta_BTH = self._rates(*raw, mask_BT)
                if starts_BT is not None:
                    log_BTH = log_BTH.masked_fill(starts_BT[..., None], GONE)
                o_BTHV, end = op.rule(found, q, k, v, (log_BTH, beta_BTH), start)
            y_BTHV = op.gated_norm(found, o_BTHV, g_BTHV, self.o_norm)
        else:
            q, k = (l2_normalize(p.to(compute_dtype(p)), L2_EPS) for p in (q, k))
            o_BTHV, end = delta_rule_chunked(q, k, v, *self._rates(*raw, mask_BT), start, starts_BT)
            y_BTHV = (self.o_norm(o_BTHV) * F.silu(g_BTHV.to(o_BTHV.dtype))).to(g_BTHV.dtype)
        return linear(self.o_proj, y_BTHV.flatten(2)), {"conv": window, "S": end}

    def convolved(
        self, qkv: list[Tensor], state: State | None, mask_BT: Tensor | None, starts_BT: Tensor | None
    ) -> tuple[list[Tensor], Tensor]:
        """silu(conv(q)), of k and of v, (B, T, H, ·) each, and the last inputs of the convolutions."""
        convs = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        if qkv[0].shape[1] == 1 and not torch.is_grad_enabled() and all(map(is_unhooked, convs)):
            # one launch, and no copies of parts of the window
            flags = (None if x is None else x.transpose(0, 1) for x in (mask_BT, starts_BT))
            taps_CK, whole = self.taps(*(c.weight for c in convs)), torch.cat(qkv, -1).transpose(0, 1)
            y_TBC, window = causal_conv(
                whole, taps_CK, None, None if state is None else state["conv"], *flags, silu=True
            )
            parts = y_TBC.transpose(0, 1).split([p.shape[-1] for p in qkv], -1)
            return [y.unflatten(-1, (self.heads, -1)) for y in parts], window
        windows = [None] * 3 if state is None else state["conv"].split([c.weight.shape[0] for c in convs], -1)
        done = [c(p, window, mask_BT, starts_BT) for c, p, window in zip(convs, qkv, windows, strict=True)]
        return [y.unflatten(-1, (self.heads, -1)) for y, _ in done], torch.cat([w for _, w in done], -1)

    def _rates(self, a_BTH: Tensor, b_BTH: Tensor, mask_BT: Tensor | None) -> tuple[Tensor, Tensor]:
        """log α and β, (B, T, H) in float32 or float64; 0 where the mask is False."""
        dtype = compute_dtype(a_BTH, self.A_log)
        with without_autocast(a_BTH):
            # by logsigmoid, whose bits on a CPU do not depend on the number of rows
            log_BTH = self.A_log.to(dtype).exp() * F.logsigmoid(-(a_BTH.to(dtype) + self.dt_bias.to(dtype)))
            beta_BTH = F.logsigmoid(b_BTH.to(dtype)).exp() * (2 if self.config.allow_neg_eigval else 1)
        if mask_BT is not None:
            log_BTH, beta_BTH = (torch.where(mask_BT[..., None], r, 0) for r in (log_BTH, beta_BTH))
        return log_BTH, beta_BTH

    @classmethod
    def validate(cls, dim: int, config: GDNConfig) -> None:
        """Raises `ConfigError` unless the width of a value is whole and at least one head fits into the model width."""
        wide = config.head_dim * config.expand_v
        if wide != config.values or not config.values:
            near = max(1, round(wide)) / config.head_dim
            raise ConfigError(
                f"head_dim {config.head_dim} x expand_v {config.expand_v:g} = {wide:g}, not a whole width; nearest: "
                f"expand_v {near:.10g}"
            )
        if not config.n_heads:
            need_whole_heads(dim, config.head_dim, ": set n_heads")

    @classmethod
    def state_spec(cls, dim: int, config: GDNConfig) -> StateSpec:
        heads = config.heads(dim)
        channels = heads * (2 * config.head_dim + config.values)
        return {
            "conv": ((config.d_conv - 1, channels), torch.float32),
            "S": ((heads, config.head_dim, config.values), torch.float32),
        }

    def backend(self) -> str:
        return "torch" if op.kernels(self.o_proj.weight, self.config.head_dim) is None else "fla"
