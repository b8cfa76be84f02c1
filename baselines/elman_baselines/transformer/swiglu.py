"""The SwiGLU branch: no state, every position by itself.

B batch, T time, D model width, F hidden width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elman_core import Mixer, State
from elman_core.registry import StateSpec

from .config import TransformerConfig, residual_scale


class SwiGLU(Mixer):
    """y = W_down (silu(W_gate x) · (W_up x)), Shazeer 2020. gate_proj, up_proj (F, D), down_proj (D, F)."""

    rollback = "replay"  # one pass over the inputs, where snapshots would take them one by one
    config: TransformerConfig

    def __init__(self, dim: int, config: TransformerConfig, layer_idx: int = 0) -> None:
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
        nn.init.normal_(self.down_proj.weight, std=0.02 * residual_scale(self.config.init_depth, 2))

    def forward(
        self,
        x_BTD: Tensor,
        state: State | None = None,
        mask_BT: Tensor | None = None,
        starts_BT: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        return self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD)), {}

    @classmethod
    def param_count(cls, dim: int, config: TransformerConfig) -> int:
        """3 D F."""
        return 3 * dim * config.hidden(dim)

    @classmethod
    def state_spec(cls, dim: int, config: TransformerConfig) -> StateSpec:
        return {}

    def backend(self) -> str:
        return ""
