"""The options of Gated DeltaNet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from elman_core import option


@dataclass(frozen=True)
class GDNConfig:
    expand_v: float = option(2.0, "width of a value / width of a key", gt=0, le=8)
    head_dim: int = option(128, "width K of a query and key, the rows of a head's state", ge=1, le=256)
    n_heads: int = option(0, "number H of heads; 0: as many as the model's width has room for", ge=0, le=1024)
    d_conv: int = option(4, "width of the causal convolutions of q, k and v", ge=2, le=8)
    allow_neg_eigval: bool = option(
        False, "β from 0 to 2: along k the state's sign may change, as counting and states need"
    )
    init: Literal["normal", "zero", "linear"] = option(
        "normal", "maps and convolutions: N(0, 0.02); the same with an output map of 0; or as torch starts them"
    )

    def heads(self, dim: int) -> int:
        """H."""
        return self.n_heads or dim // self.head_dim

    @property
    def values(self) -> int:
        """V, the width of one head's value, the columns of its state."""
        return int(self.head_dim * self.expand_v)
