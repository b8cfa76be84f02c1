"""Matrix-state mixers around q, k, v of the input, with one state per head.

B batch, T time, D model width, H heads, N key width, V value width, C channels of the projection of q, k, v.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elman_core.kernels import Maps, MatrixKernel
from elman_core.registry import ConfigError, Mixer, State, StateSpec, option

from .conv import CausalConv
from .functional import compute_dtype, mamba_decay
from .gated import gated
from .init import mamba_decay_, xavier_uniform_
from .linear import linear, linears
from .norm import RMSNorm


@dataclass(frozen=True)
class MatrixConfig:
    """Options of the layer around a matrix state; the config of a variant inherits them."""

    expansion: float = option(1.0, "width of a value / width of a key", gt=0.0, le=8.0)
    n_state: int = option(32, "width N of a query and key, the rows of a head's state", ge=4, le=128, multiple_of=4)
    n_heads: int = option(16, "number H of heads", ge=1, le=1024)
    use_conv: bool = option(False, "causal depthwise convolution on q, k, v; its window is state")
    d_conv: int = option(4, "width of that convolution, in steps", ge=2, le=64)
    use_gate: bool = option(True, "gate on the output, from a separate projection")
    gate_activation: Literal["sigmoid", "silu"] = option("sigmoid", "activation of that gate")
    use_silu: bool = option(True, "SiLU on q, k, v")
    l2_norm: bool = option(True, "q and k of each head have length 1")
    decay: Literal["mamba", "simple", "constant", "none"] = option("mamba", "decay of the state, one for each head")
    use_write_gate: bool = option(False, "sigmoid gate on what is written, one for each head")
    write_scale: float = option(1.0, "factor of the write gate; without tanh at most 1 + decay", gt=0.0, le=2.0)
    value_residual: bool = option(False, "a learned multiple of v is added to the output")
    tie_kv: bool = option(False, "v is k before its normalisation (needs expansion 1)")
    linear_state: bool = option(False, "no tanh around the new state")
    use_output_norm: bool = option(True, "RMSNorm of each head's output")
    output_norm_eps: float = option(1e-5, "what that norm adds to the mean square", gt=0.0, le=1.0)
    head_mix: Literal["concat", "weighted_sum", "per_head", "input_weighted", "sum"] = option(
        "concat", "how the outputs of the heads become one; 'per_head' is 'concat' with each head drawn by itself"
    )
    init: Literal["xavier", "normal", "zero"] = option(
        "xavier",
        "xavier: Xavier projections, convolution as in torch.nn; normal: all N(0, 0.02²); zero: as normal, with an output "
        "projection of 0, so that a layer starts as the identity",
    )

    @property
    def keys(self) -> int:
        """H N, the width of all queries or of all keys."""
        return self.n_heads * self.n_state

    @property
    def head_values(self) -> int:
        """V, the width of one head's value, the columns of its state: N · expansion, whole once validated."""
        return round(self.n_state * self.expansion)

    @property
    def values(self) -> int:
        """H V, the width of all values."""
        return self.n_heads * self.head_values

    @property
    def projected(self) -> int:
        """C: rows of the projection that makes q, k and (unless tied) v."""
        return 2 * self.keys + (0 if self.tie_kv else self.values)

    @property
    def concatenates(self) -> bool:
        """Whether the heads' outputs are concatenated in front of the output projection; otherwise they are summed."""
        return self.head_mix in ("concat", "per_head")


class MatrixMixer(Mixer):
    """x → q, k, v → conv → SiLU → L2 norm of q, k → recurrence → + D v → RMSNorm → gate → head mixing → y.

    A subclass names the kernel, whose cell has the scalars decay and, optionally, write strength, and the option linear_state.
    If the cell has other inputs, the subclass adds their projections in `maps` and overrides `recur`.

    Parameters, where the options ask for them: qkv_proj (C, D), rows q, k, v, each head after head, C = 2HN + HV (q, k and
    C = 2HN with `tie_kv`); conv (C, 1, d_conv); decay: a_proj (H, D), A_log (H), dt_bias (H), or beta_proj (H, D), or
    decay_logit (H); write_gate_proj (H, D); value_residual (H, V); o_norm (V); g_proj (HV, D); head_weights (H) or head_attn
    (H, D); o_proj (D, HV), or (D, V) where the heads are summed. No biases.

    State: S (B, H, N, V), rows keys, and with `use_conv` conv (B, d_conv - 1, C).
    """

    fp32_params = ("A_log", "dt_bias", "decay_logit")
    no_decay = ("value_residual",)
    torch_init: ClassVar[tuple[str, ...]] = ("write_gate_proj",)
    """Projections that start as torch.nn.Linear does, U(±D^(-1/2)), if the others are Xavier uniform."""
    kernel: MatrixKernel
    config: Any
    A_log: Tensor
    dt_bias: Tensor
    decay_logit: Tensor
    value_residual: Tensor
    head_weights: Tensor

    @classmethod
    def maps(cls, config: Any) -> dict[str, int]:
        """The projections of x: {name: rows}; a projection with 0 rows does not exist."""
        heads = config.n_heads
        return {
            "qkv_proj": config.projected,
            "a_proj": heads * (config.decay == "mamba"),
            "beta_proj": heads * (config.decay == "simple"),
            "write_gate_proj": heads * config.use_write_gate,
            "g_proj": config.values * config.use_gate,
            "head_attn": heads * (config.head_mix == "input_weighted"),
        }

    @classmethod
    def vectors(cls, config: Any) -> dict[str, tuple[tuple[int, ...], float]]:
        """The parameters that multiply no input: {name: (shape, value at the start)}."""
        heads = (config.n_heads,)
        at_start: dict[str, Any] = {"A_log": (heads, 0.0), "dt_bias": (heads, 0.0)} if config.decay == "mamba" else {}
        at_start |= {"decay_logit": (heads, 4.0)} if config.decay == "constant" else {}
        at_start |= {"value_residual": ((*heads, config.head_values), 1.0)} if config.value_residual else {}
        return at_start | ({"head_weights": (heads, 1 / heads[0])} if config.head_mix == "weighted_sum" else {})

    def __init__(self, dim: int, config: Any, layer_idx: int = 0) -> None:
        super().__init__(dim, config, layer_idx)
        for name, (shape, _) in self.vectors(config).items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        self.projections = [name for name, rows in self.maps(config).items() if rows]
        for name in self.projections:
            self.add_module(name, nn.Linear(dim, self.maps(config)[name], bias=False))
        self.conv: CausalConv | None = None
        if config.use_conv:
            self.conv = CausalConv(config.projected, config.d_conv, bias=False, dim=1, silu=config.use_silu)
        self.o_norm = RMSNorm(config.head_values, config.output_norm_eps) if config.use_output_norm else None
        self.o_proj = nn.Linear(config.values if config.concatenates else config.head_values, dim, bias=False)
        self.reset_parameters()

    def forward(
        self, x_BTD: Tensor, state: State | None = None, mask_BT: Tensor | None = None, starts_BT: Tensor | None = None
    ) -> tuple[Tensor, State]:
        config = self.config
        new_state: State = {}
        modules = [getattr(self, name) for name in self.projections]
        projected = dict(zip(self.projections, linears(modules, x_BTD), strict=True))
        qkv_BTC = projected["qkv_proj"]
        silu = config.use_silu and self.conv is None  # otherwise the convolution applies SiLU
        if self.conv is not None:
            window = None if state is None else state["conv"]
            qkv_BTC, new_state["conv"] = self.conv(qkv_BTC, window, mask_BT, starts_BT)
        if config.tie_kv:  # v is k as it is here: SiLU follows for both, the norm for k alone
            qkv_BTC = torch.cat((qkv_BTC, qkv_BTC[..., config.keys :]), -1)
        bounded = config.linear_state and config.write_scale > 1
        kind, decay_BTH = self._decay(x_BTD, projected, given=bounded)
        if config.write_scale != 1.0:
            gate_BTH = projected["write_gate_proj"]
            # Along k a step multiplies S by decay - write: below -1, a state without tanh would grow.
            most = (1 + decay_BTH).clamp(max=config.write_scale) if bounded else config.write_scale
            projected["write_gate_proj"] = most * F.logsigmoid(gate_BTH.to(compute_dtype(gate_BTH))).exp()
        scalars = (kind, "sigmoid" if config.write_scale == 1.0 else "given")
        o_BTHV, new_state["S"] = self.recur(
            qkv_BTC,
            decay_BTH,
            projected,
            state_BHNV=None if state is None else state["S"],
            mask_BT=mask_BT,
            starts_BT=starts_BT,
            a_log_H=self.A_log if kind == "mamba" else None,
            dt_bias_H=self.dt_bias if kind == "mamba" else None,
            maps=Maps(("q", "k", "v") if silu else (), ("q", "k") if config.l2_norm else (), scalars),
            linear_state=config.linear_state,
        )
        if config.value_residual:
            v_BTHV = qkv_BTC[..., 2 * config.keys :].unflatten(-1, (config.n_heads, -1))
            v_BTHV = F.silu(v_BTHV) if silu else v_BTHV
            o_BTHV = o_BTHV + self.value_residual.to(o_BTHV.dtype) * v_BTHV
        return self._mix(o_BTHV, projected), new_state

    def recur(
        self, qkv_BTC: Tensor, decay_BTH: Tensor, projected: dict[str, Tensor], **rest: Any
    ) -> tuple[Tensor, Tensor]:
        """(o (B, T, H, V), S_T) from the projections of x, by name. rest: as in a call of the kernel."""
        gate_BTH = projected.get("write_gate_proj")
        return self.kernel.fused(qkv_BTC, decay_BTH, gate_BTH, n_state=self.config.n_state, **rest)

    def _decay(self, x_BTD: Tensor, projected: dict[str, Tensor], given: bool) -> tuple[str, Tensor]:
        """The decay's input (B, T, H), and its map: "mamba", "sigmoid", or "given" for none, so that it is the decay itself."""
        if self.config.decay == "mamba":
            a = projected["a_proj"]
            return ("given", mamba_decay(a, self.A_log, self.dt_bias)) if given else ("mamba", a)
        if self.config.decay == "simple":
            b = projected["beta_proj"]
            return ("given", F.logsigmoid(b.to(compute_dtype(b))).exp()) if given else ("sigmoid", b)
        if self.config.decay == "constant":
            decay_H = torch.sigmoid(self.decay_logit.to(compute_dtype(self.decay_logit)))
        else:
            decay_H = x_BTD.new_ones(self.config.n_heads, dtype=compute_dtype(x_BTD))
        return "given", decay_H.expand(*x_BTD.shape[:2], -1)

    def _mix(self, o_BTHV: Tensor, projected: dict[str, Tensor]) -> Tensor:
        """Norm, gate, and one output for all heads."""
        config = self.config
        if config.use_gate:
            out = self.o_proj if config.concatenates else None
            o_BTHV = gated(o_BTHV, projected["g_proj"], config.gate_activation, self.o_norm, out)
            if out is not None:
                return o_BTHV
        elif self.o_norm is not None:
            o_BTHV = self.o_norm(o_BTHV)
        if config.concatenates:
            return linear(self.o_proj, o_BTHV.flatten(2))
        if config.head_mix == "sum":
            return linear(self.o_proj, o_BTHV.sum(2))
        logits = self.head_weights if config.head_mix == "weighted_sum" else projected["head_attn"]
        weights = torch.softmax(logits.to(compute_dtype(logits)), -1).to(o_BTHV.dtype)
        return linear(self.o_proj, (o_BTHV * weights[..., None]).sum(2))

    def stacked(self) -> dict[str, tuple[int, ...]]:
        values = () if self.config.tie_kv else (self.config.values,)
        return {"qkv_proj.weight": (self.config.keys, self.config.keys, *values)}

    def backend(self) -> str:
        return self.kernel.backend(self.o_proj.weight.device, self.config.n_state, self.config.head_values)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        config, bound = self.config, self.dim**-0.5
        for name, module in self.named_children():
            if config.init != "xavier" and isinstance(module, nn.Linear | CausalConv):
                nn.init.normal_(module.weight, std=0.0 if config.init == "zero" and name == "o_proj" else 0.02)
            elif not isinstance(module, nn.Linear):
                module.reset_parameters()  # type: ignore[operator]  # the convolution, the norm
            elif name in self.torch_init:
                nn.init.uniform_(module.weight, -bound, bound)
            else:
                blocks = [module.weight]
                if name == "qkv_proj" and config.tie_kv:  # q and k each
                    blocks = module.weight.split(config.keys)
                elif name == "o_proj" and config.head_mix == "per_head":
                    blocks = module.weight.split(config.head_values, 1)
                for block in blocks:
                    xavier_uniform_(block)
        for name, (_, start) in self.vectors(config).items():
            nn.init.constant_(getattr(self, name), start)
        if config.decay == "mamba":
            mamba_decay_(self.A_log, self.dt_bias)

    @classmethod
    def validate(cls, dim: int, config: Any) -> None:
        """Raises `ConfigError` unless the width of a head's value is whole and the options fit together.

        The limits of `n_state` and `n_heads` come from the kernels. The reference does not need them, but a model that trains
        on a CPU must also run on a GPU.
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
        if config.write_scale != 1.0 and not config.use_write_gate:
            raise ConfigError(f"write_scale {config.write_scale:g} scales the write gate: set use_write_gate=true")

    @classmethod
    def state_spec(cls, dim: int, config: Any) -> StateSpec:
        spec: StateSpec = {"S": ((config.n_heads, config.n_state, config.head_values), torch.float32)}
        if config.use_conv:
            spec["conv"] = ((config.d_conv - 1, config.projected), torch.float32)
        return spec
