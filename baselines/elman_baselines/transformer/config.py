"""The options of the transformer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from elman_core import option


@dataclass(frozen=True)
class TransformerConfig:
    head_dim: int = option(64, "width of a head; the model's width is a multiple of it", ge=2, le=256, multiple_of=2)
    rope_theta: float = option(10000.0, "base of the rotary angles", gt=1)
    mlp_ratio: float = option(8 / 3, "width of the SwiGLU / model width, before it is rounded up", gt=0, le=16)
    mlp_multiple: int = option(256, "the width of the SwiGLU is rounded up to a multiple of it", ge=1, le=4096)
    init_depth: int = option(
        0, "the maps onto the stream start divided by sqrt(2 x this), the number of layers; 0: not", ge=0
    )

    def hidden(self, dim: int) -> int:
        """F, width of the SwiGLU."""
        return math.ceil(max(1, int(dim * self.mlp_ratio)) / self.mlp_multiple) * self.mlp_multiple


def residual_scale(init_depth: int, branches: int) -> float:
    """What the map of a branch that writes to the residual stream is multiplied with at the start."""
    return 1 / math.sqrt(branches * init_depth) if init_depth else 1.0
