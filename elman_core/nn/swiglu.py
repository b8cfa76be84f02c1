"""The SwiGLU branch: it has no state and treats every position by itself. D model width, F hidden width."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from elman_core.registry import Mixer, State, StateSpec, option

from .gated import gated
from .linear import linears


@dataclass(frozen=True)
class SwiGLUConfig:
    """Options of a SwiGLU; the config of a variant that has one inherits them."""

    mlp_ratio: float = option(8 / 3, "width of the SwiGLU / model width, before it is rounded up", gt=0, le=16)
    mlp_multiple: int = option(256, "the width of the SwiGLU is rounded up to a multiple of it", ge=1, le=4096)
    init_depth: int = option(
        0, "the maps onto the stream start divided by sqrt(2 x this), the number of layers; 0: not", ge=0
    )

    def hidden(self, dim: int) -> int:
        """F."""
        return math.ceil(max(1, int(dim * self.mlp_ratio)) / self.mlp_multiple) * self.mlp_multiple

    @property
    def residual_scale(self) -> float:
        """The initial factor of the maps onto the stream, in layers with two branches."""
        return 1 / math.sqrt(2 * self.init_depth) if self.init_depth else 1.0


class SwiGLU(Mixer):
    """y = W_down (silu(W_gate x) · (W_up x)), Shazeer 2020. gate_proj, up_proj (F, D) and down_proj (D, F) from N(0, 0.02²)."""

    config: SwiGLUConfig

    def __init__(self, dim: int, config: SwiGLUConfig, layer_idx: int = 0) -> None:
        super().__init__(dim, config, layer_idx)
        hidden = config.hidden(dim)
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for projection in (self.gate_proj, self.up_proj):
            nn.init.normal_(projection.weight, std=0.02)
        nn.init.normal_(self.down_proj.weight, std=0.02 * self.config.residual_scale)

    def forward(
        self, x_BTD: Tensor, state: State | None = None, mask_BT: Tensor | None = None, starts_BT: Tensor | None = None
    ) -> tuple[Tensor, State]:
        gate_BTF, up_BTF = linears((self.gate_proj, self.up_proj), x_BTD)
        width = math.gcd(up_BTF.shape[-1], 512)  # of the rows that the kernel takes
        return gated(up_BTF.unflatten(-1, (-1, width)), gate_BTF, "silu", out=self.down_proj), {}

    @classmethod
    def state_spec(cls, dim: int, config: SwiGLUConfig) -> StateSpec:
        return {}

    def backend(self) -> str:
        return ""
