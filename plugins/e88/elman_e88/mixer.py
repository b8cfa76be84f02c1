"""The E88 mixer: parameters, initialisation, and all of the layer that is not the recurrence.

B batch, T time, D model width, H heads, N key width, V value width, C channels of the projection of q, k, v.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elman_core import ConfigError, Mixer, State
from elman_core.kernels import Maps
from elman_core.nn import CausalConv, RMSNorm, compute_dtype, linear, linears, mamba_decay_, xavier_uniform_
from elman_core.registry import StateSpec

from .config import CONV_WIDTH, E88Config
from .op import KEYS, QKV, e88

PROJECTIONS = (
    "qkv_proj",
    "a_proj",
    "beta_proj",
    "write_gate_proj",
    "g_proj",
    "head_attn",
)  # of x, where the options ask


class E88Mixer(Mixer):
    """x → q, k, v → conv → SiLU → L2 norm of q, k → recurrence → + D v → RMSNorm → gate → head mixing → y.

    Parameters, where the options ask for them: qkv_proj (C, D), rows q, k, v, each head after head, C = 2HN + HV (q, k and
    C = 2HN with `tie_kv`); conv (C, 1, 4); decay: a_proj (H, D), A_log (H), dt_bias (H), or beta_proj (H, D), or decay_logit
    (H); write_gate_proj (H, D); value_residual (H, V); o_norm (V); g_proj (HV, D); head_weights (H) or head_attn (H, D);
    o_proj (D, HV), or (D, V) where the heads are summed. No biases.

    State: S (B, H, N, V), rows keys, and with `use_conv` conv (B, 3, C).
    """

    rollback = "replay"
    fp32_params = ("A_log", "dt_bias", "decay_logit")
    no_decay = ("value_residual",)
    config: E88Config

    def __init__(self, dim: int, config: E88Config, layer_idx: int = 0) -> None:
        super().__init__(dim, config, layer_idx)
        heads, per_head = config.n_heads, config.head_values
        self.qkv_proj = nn.Linear(dim, config.projected, bias=False)
        if config.use_conv:
            self.conv = CausalConv(config.projected, CONV_WIDTH, bias=False, dim=1)
        if config.decay == "mamba":
            self.a_proj = nn.Linear(dim, heads, bias=False)
            self.A_log = nn.Parameter(torch.empty(heads))
            self.dt_bias = nn.Parameter(torch.empty(heads))
        elif config.decay == "simple":
            self.beta_proj = nn.Linear(dim, heads, bias=False)
        elif config.decay == "constant":
            self.decay_logit = nn.Parameter(torch.empty(heads))
        if config.use_write_gate:
            self.write_gate_proj = nn.Linear(dim, heads, bias=False)
        if config.value_residual:
            self.value_residual = nn.Parameter(torch.empty(heads, per_head))
        if config.use_output_norm:
            self.o_norm = RMSNorm(per_head)
        if config.use_gate:
            self.g_proj = nn.Linear(dim, config.values, bias=False)
        if config.head_mix == "weighted_sum":
            self.head_weights = nn.Parameter(torch.empty(heads))
        elif config.head_mix == "input_weighted":
            self.head_attn = nn.Linear(dim, heads, bias=False)
        self.o_proj = nn.Linear(config.mixed, dim, bias=False)
        self.reset_parameters()

    def forward(
        self,
        x_BTD: Tensor,
        state: State | None = None,
        mask_BT: Tensor | None = None,
        starts_BT: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        config = self.config
        new_state: State = {}
        projected = self._project(x_BTD)
        qkv_BTC = projected["qkv_proj"]
        if config.use_conv:
            window = None if state is None else state["conv"]
            qkv_BTC, new_state["conv"] = self.conv(qkv_BTC, window, mask_BT, starts_BT)
        if config.tie_kv:  # v is k as it is here: SiLU follows for both, the norm for k alone
            qkv_BTC = torch.cat((qkv_BTC, qkv_BTC[..., config.keys :]), -1)
        kind, decay_BTH = self._decay(x_BTD, projected)
        mamba = kind == "mamba"
        o_BTHV, new_state["S"] = e88.fused(
            qkv_BTC,
            decay_BTH,
            projected.get("write_gate_proj"),
            n_state=config.n_state,
            state_BHNV=None if state is None else state["S"],
            mask_BT=mask_BT,
            starts_BT=starts_BT,
            a_log_H=self.A_log if mamba else None,
            dt_bias_H=self.dt_bias if mamba else None,
            maps=Maps(QKV if config.use_silu else (), KEYS if config.l2_norm else (), (kind, "sigmoid")),
            linear_state=config.linear_state,
        )
        if config.value_residual:
            v_BTHV = qkv_BTC[..., 2 * config.keys :].unflatten(-1, (config.n_heads, -1))
            v_BTHV = F.silu(v_BTHV) if config.use_silu else v_BTHV
            o_BTHV = o_BTHV + self.value_residual.to(o_BTHV.dtype) * v_BTHV
        return self._mix(o_BTHV, projected), new_state

    def _project(self, x_BTD: Tensor) -> dict[str, Tensor]:
        """What all projections of x that these options have come to, by their names."""
        names = [name for name in PROJECTIONS if hasattr(self, name)]
        return dict(zip(names, linears([getattr(self, name) for name in names], x_BTD), strict=True))

    def _decay(self, x_BTD: Tensor, projected: dict[str, Tensor]) -> tuple[str, Tensor]:
        """What the decay (B, T, H) is made of, and by which map: "mamba", "sigmoid", or "given" as it is."""
        if self.config.decay == "mamba":
            return "mamba", projected["a_proj"]
        if self.config.decay == "simple":
            return "sigmoid", projected["beta_proj"]
        if self.config.decay == "constant":
            decay_H = torch.sigmoid(_full(self.decay_logit))
        else:
            decay_H = x_BTD.new_ones(self.config.n_heads, dtype=compute_dtype(x_BTD))
        return "given", decay_H.expand(*x_BTD.shape[:2], -1)

    def _mix(self, o_BTHV: Tensor, projected: dict[str, Tensor]) -> Tensor:
        """Norm, gate, and one output of all heads."""
        config = self.config
        if config.use_output_norm:
            o_BTHV = self.o_norm(o_BTHV)
        if config.use_gate:
            g_BTHV = projected["g_proj"].unflatten(-1, (config.n_heads, -1))
            o_BTHV = o_BTHV * (F.silu(g_BTHV) if config.gate_activation == "silu" else torch.sigmoid(g_BTHV))
        if config.head_mix in ("concat", "per_head"):
            return linear(self.o_proj, o_BTHV.flatten(2))
        if config.head_mix == "sum":
            return linear(self.o_proj, o_BTHV.sum(2))
        logits = self.head_weights if config.head_mix == "weighted_sum" else projected["head_attn"]
        weights = torch.softmax(_full(logits), -1).to(o_BTHV.dtype)
        return linear(self.o_proj, (o_BTHV * weights[..., None]).sum(2))

    def backend(self) -> str:
        return e88.backend(self.qkv_proj.weight.device, self.config.n_state, self.config.head_values)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        config = self.config
        blocks = self.qkv_proj.weight.split(config.keys) if config.tie_kv else (self.qkv_proj.weight,)
        blocks += (
            self.o_proj.weight.split(config.head_values, 1) if config.head_mix == "per_head" else (self.o_proj.weight,)
        )
        for name in ("a_proj", "beta_proj", "g_proj", "head_attn"):
            if hasattr(self, name):
                blocks += (getattr(self, name).weight,)
        for block in blocks:
            xavier_uniform_(block)
        if config.use_conv:
            self.conv.reset_parameters()
        if config.decay == "mamba":
            mamba_decay_(self.A_log, self.dt_bias)
        elif config.decay == "constant":
            nn.init.constant_(self.decay_logit, 4.0)
        if config.use_write_gate:
            bound = self.dim**-0.5
            nn.init.uniform_(self.write_gate_proj.weight, -bound, bound)
        if config.value_residual:
            nn.init.ones_(self.value_residual)
        if config.use_output_norm:
            self.o_norm.reset_parameters()
        if config.head_mix == "weighted_sum":
            nn.init.constant_(self.head_weights, 1 / config.n_heads)

    @classmethod
    def validate(cls, dim: int, config: E88Config) -> None:
        """Raises `ConfigError` unless a value of a head is a whole number wide and the options fit together.

        The limits of `n_state` and `n_heads` are those of kernels. The reference could do without, but a model that trains on
        a CPU must run on a GPU as well.
        """
        n, exact = config.n_state, config.n_state * config.expansion
        if abs(exact - config.head_values) > 1e-9 or config.head_values < 1:
            nearest = max(1, config.head_values) / n
            raise ConfigError(
                f"n_state {n} x expansion {config.expansion:g} gives {exact:g} values a head, which must be a whole number; "
                f"nearest: expansion {nearest:.12g}"
            )
        if config.tie_kv and config.expansion != 1.0:
            raise ConfigError(f"tie_kv needs expansion 1, not {config.expansion:g}: a value is its key")

    @classmethod
    def param_count(cls, dim: int, config: E88Config) -> int:
        heads, values, per_head = config.n_heads, config.values, config.head_values
        count = dim * config.projected + dim * config.mixed
        count += {"mamba": dim * heads + 2 * heads, "simple": dim * heads, "constant": heads, "none": 0}[config.decay]
        count += CONV_WIDTH * config.projected if config.use_conv else 0
        count += dim * values if config.use_gate else 0
        count += dim * heads if config.use_write_gate else 0
        count += values if config.value_residual else 0
        count += per_head if config.use_output_norm else 0
        return count + {"weighted_sum": heads, "input_weighted": dim * heads}.get(config.head_mix, 0)

    @classmethod
    def state_spec(cls, dim: int, config: E88Config) -> StateSpec:
        spec: StateSpec = {"S": ((config.n_heads, config.n_state, config.head_values), torch.float32)}
        if config.use_conv:
            spec["conv"] = ((CONV_WIDTH - 1, config.projected), torch.float32)
        return spec


def _full(x: Tensor) -> Tensor:
    return x.to(compute_dtype(x))
