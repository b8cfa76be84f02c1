"""The options of the transformer."""

from __future__ import annotations

from dataclasses import dataclass

from elman_core import option
from elman_core.nn import SwiGLUConfig


@dataclass(frozen=True)
class TransformerConfig(SwiGLUConfig):
    head_dim: int = option(64, "width of a head; the model's width is a multiple of it", ge=2, le=256, multiple_of=2)
    rope_theta: float = option(10000.0, "base of the rotary angles", gt=1)
