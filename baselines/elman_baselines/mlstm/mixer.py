"""The mLSTM mixer. B batch, T time, D model width, H heads, N width of a key, V of a value."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elman_core import ConfigError, Mixer, State, option
from elman_core.nn import compute_dtype, linear, linears, without_autocast
from elman_core.registry import StateSpec

from .op import ALIGN, matrix, mlstm

NORM_EPS = 1e-6
"""As in xLSTM 7B. At the start the input gates let h have a variance far below 1e-5, the default of torch."""


@dataclass(frozen=True)
class MLSTMConfig:
    n_heads: int = option(0, "number H of heads; 0: as many as the model's width has room for", ge=0, le=1024)
    head_dim: int = option(128, "width V of a value, the columns of a head's state", ge=8, le=1024)
    key_dim: int = option(64, "width N of a query and key, the rows of a head's state", ge=4, le=128, multiple_of=4)
    gate_cap: float = option(15.0, "logits x of both gates become cap tanh(x / cap)", gt=0.0, le=1000.0)

    def heads(self, dim: int) -> int:
        """H."""
        return self.n_heads or dim // self.head_dim


class MLSTM(Mixer):
    """x → q, k, v, i~, f~ → recurrence → LayerNorm of each head → sigmoid gate → out: the layer of xLSTM 7B.

    Parameters: q_proj, k_proj (H N, D), v_proj, o_proj (H V, D), i_proj, f_proj (H, D) with biases, norm (H V), out_proj
    (D, H V). State: C (B, H, N, V), n (B, H, N), m (B, H).
    """

    config: MLSTMConfig

    def __init__(self, dim: int, config: MLSTMConfig, layer_idx: int = 0) -> None:
        super().__init__(dim, config, layer_idx)
        heads = self.heads = config.heads(dim)
        keys, values = heads * config.key_dim, heads * config.head_dim
        self.q_proj, self.k_proj = (nn.Linear(dim, keys, bias=False) for _ in range(2))
        self.v_proj, self.o_proj = (nn.Linear(dim, values, bias=False) for _ in range(2))
        self.i_proj, self.f_proj = (nn.Linear(dim, heads) for _ in range(2))
        self.norm = nn.Parameter(torch.empty(values))
        self.out_proj = nn.Linear(values, dim, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Maps N(0, 0.02); those of the gates 0, with biases of -10 for i~, and from 3 to 6 over the heads for f~."""
        for module in self.children():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.0 if module.bias is not None else 0.02)
        nn.init.constant_(self.i_proj.bias, -10.0)
        self.f_proj.bias.copy_(torch.linspace(3.0, 6.0, self.heads))
        nn.init.ones_(self.norm)

    def forward(
        self,
        x_BTD: Tensor,
        state: State | None = None,
        mask_BT: Tensor | None = None,
        starts_BT: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        maps = (self.q_proj, self.k_proj, self.v_proj, self.o_proj, self.i_proj, self.f_proj)
        *apart, i_BTH, f_BTH = linears(maps, x_BTD)
        q, k, v, o = (x.unflatten(-1, (self.heads, -1)) for x in apart)
        with without_autocast(x_BTD):
            cap, wide = self.config.gate_cap, compute_dtype(x_BTD)
            i_BTH, f_BTH = (cap * (x.to(wide) / cap).tanh() for x in (i_BTH, f_BTH))
            start = None if state is None else (state["C"], state["n"], state["m"])
            h_BTHV, (c, n, m) = mlstm(q, k, v, i_BTH, F.logsigmoid(f_BTH), start, mask_BT, starts_BT)
            weight_HV = self.norm.to(wide).unflatten(0, (self.heads, -1))
            normed_BTHV = F.layer_norm(h_BTHV, h_BTHV.shape[-1:], eps=NORM_EPS) * weight_HV
            y_BTHV = (normed_BTHV * o.to(wide).sigmoid()).to(v.dtype)
        return linear(self.out_proj, y_BTHV.flatten(2)), {"C": c, "n": n, "m": m}

    @classmethod
    def validate(cls, dim: int, config: MLSTMConfig) -> None:
        """Raises `ConfigError` unless the width is a multiple of head_dim, or n_heads is set."""
        if not config.n_heads and dim % config.head_dim:
            raise ConfigError(
                f"width {dim} is not a multiple of head_dim {config.head_dim}: set n_heads, head_dim or another width"
            )

    @classmethod
    def state_spec(cls, dim: int, config: MLSTMConfig) -> StateSpec:
        heads, keys = config.heads(dim), config.key_dim
        shapes = {"C": (heads, keys, config.head_dim), "n": (heads, keys), "m": (heads,)}
        return {name: (shape, torch.float32) for name, shape in shapes.items()}

    def backend(self) -> str:
        columns = self.config.head_dim + 1
        return matrix.backend(self.out_proj.weight.device, self.config.key_dim, columns + -columns % ALIGN)
