"""The M²RNN mixer. B batch, T time, D model width, H heads, K rows and V columns of a head's state."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elman_core import ConfigError, Mixer, State, option
from elman_core.nn import CausalConv, RMSNorm, linear, mamba_decay, mamba_decay_, xavier_uniform_
from elman_core.registry import StateSpec

from .op import m2rnn

CONV_WIDTH = 4


@dataclass(frozen=True)
class M2RNNConfig:
    """The shape of M²RNN and the parts of its layer."""

    n_state: int = option(16, "rows K of a head's state, the width of a query and key", ge=1, le=128)
    expansion: float = option(1.0, "columns V of a head's state / K", gt=0.0, le=8.0)
    n_heads: int = option(16, "number H of heads", ge=1, le=1024)
    shared_keys: bool = option(False, "one query and one key for all heads")
    use_gate: bool = option(True, "silu gate on the output, from the input")
    use_conv: bool = option(False, "causal depthwise convolution of width 4 and SiLU on q, k, v; its window is state")
    use_output_norm: bool = option(False, "RMSNorm over the outputs of all heads together")

    @property
    def columns(self) -> int:
        """V, whole once validated."""
        return round(self.n_state * self.expansion)

    @property
    def widths(self) -> tuple[int, ...]:
        """Of q, k, v, f, and the gate's logit."""
        keys, values = self.n_state * (1 if self.shared_keys else self.n_heads), self.columns * self.n_heads
        return keys, keys, values, self.n_heads, values * self.use_gate


class M2RNNMixer(Mixer):
    """x → q, k, v, f̂, g = W x → conv, SiLU of q, k, v → S_t = f S_{t-1} + (1 - f) tanh(S_{t-1} W_h + k vᵀ)
    → S_tᵀ q + D v → silu(g) → RMSNorm → out. f = exp(-exp(A_log) softplus(f̂ + dt_bias)), one a head.

    Parameters: in_proj.weight, rows of q, k, v, f̂, g, each head after head, of `M2RNNConfig.widths`; w_h (H, V, V); A_log (H);
    dt_bias (H); d (H, V), published as D; out_proj.weight (D, HV); conv.weight (C, 1, 4); o_norm.weight (HV).
    State: S (B, H, K, V) and, with `use_conv`, conv (B, 3, C).
    """

    fp32_params = ("A_log", "dt_bias")
    no_decay = ("d",)
    config: M2RNNConfig

    def __init__(self, dim: int, config: M2RNNConfig, layer_idx: int = 0) -> None:
        super().__init__(dim, config, layer_idx)
        heads, columns = config.n_heads, config.columns
        self.in_proj = nn.Linear(dim, sum(config.widths), bias=False)
        self.w_h = nn.Parameter(torch.empty(heads, columns, columns))
        self.A_log, self.dt_bias = (nn.Parameter(torch.empty(heads)) for _ in range(2))
        self.d = nn.Parameter(torch.empty(heads, columns))
        self.conv: CausalConv | None = None
        if config.use_conv:
            self.conv = CausalConv(sum(config.widths[:3]), CONV_WIDTH, bias=False, dim=1, silu=True)
        self.o_norm = RMSNorm(heads * columns) if config.use_output_norm else None
        self.out_proj = nn.Linear(heads * columns, dim, bias=False)
        self.reset_parameters()

    def stacked(self) -> dict[str, tuple[int, ...]]:
        return {"in_proj.weight": self.config.widths}

    def forward(
        self,
        x_BTD: Tensor,
        state: State | None = None,
        mask_BT: Tensor | None = None,
        starts_BT: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        config, widths = self.config, self.config.widths
        new_state: State = {}
        qkv, f_BTH, g = linear(self.in_proj, x_BTD).split([sum(widths[:3]), *widths[3:]], -1)
        if self.conv is not None:
            qkv, new_state["conv"] = self.conv(qkv, None if state is None else state["conv"], mask_BT, starts_BT)
        q, k, v = qkv.split(widths[:3], -1)
        q, k = (x.unflatten(-1, (-1, config.n_state)) for x in (q, k))
        v_BTHV = v.unflatten(-1, (config.n_heads, -1))
        forget_BTH = mamba_decay(f_BTH, self.A_log, self.dt_bias)
        s = None if state is None else state["S"]
        o_BTHV, new_state["S"] = m2rnn(q, k, v_BTHV, forget_BTH, self.w_h, s, mask_BT, starts_BT)
        y = (o_BTHV + self.d.to(o_BTHV.dtype) * v_BTHV).flatten(2)
        y = y * F.silu(g) if config.use_gate else y
        return linear(self.out_proj, y if self.o_norm is None else self.o_norm(y)), new_state

    def backend(self) -> str:
        return m2rnn.backend(self.in_proj.weight.device, self.config.n_state, self.config.columns)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for projection in (self.in_proj, self.out_proj):
            xavier_uniform_(projection.weight)
        self.w_h.zero_()
        self.w_h.diagonal(dim1=1, dim2=2).fill_(1.0)
        mamba_decay_(self.A_log, self.dt_bias, a_min=1e-4)
        nn.init.ones_(self.d)
        if self.conv is not None:
            nn.init.normal_(self.conv.weight, std=0.02)
        if self.o_norm is not None:
            self.o_norm.reset_parameters()

    @classmethod
    def validate(cls, dim: int, config: M2RNNConfig) -> None:
        """Raises `ConfigError` unless V is a whole number."""
        exact = config.n_state * config.expansion
        if abs(exact - config.columns) > 1e-9 or config.columns < 1:
            nearest = max(1, config.columns) / config.n_state
            raise ConfigError(
                f"n_state {config.n_state} x expansion {config.expansion:g} gives {exact:g} columns, not a whole number; "
                f"nearest: expansion {nearest:.12g}"
            )

    @classmethod
    def state_spec(cls, dim: int, config: M2RNNConfig) -> StateSpec:
        spec: StateSpec = {"S": ((config.n_heads, config.n_state, config.columns), torch.float32)}
        return spec | ({"conv": ((CONV_WIDTH - 1, sum(config.widths[:3])), torch.float32)} if config.use_conv else {})
