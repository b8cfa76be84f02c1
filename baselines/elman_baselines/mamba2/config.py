"""The options of Mamba-2."""

from __future__ import annotations

from dataclasses import dataclass

from elman_core import option


@dataclass(frozen=True)
class Mamba2Config:
    d_state: int = option(128, "width N of B and C, the columns of a head's state", ge=1, le=512)
    d_conv: int = option(4, "width of the causal convolution of x, B and C", ge=2, le=4)
    expand: float = option(2.0, "inner width / model width", gt=0, le=16)
    headdim: int = option(64, "width P of a head, the rows of its state; it divides the inner width", ge=1, le=256)
    init_depth: int = option(0, "out_proj starts divided by the square root of it, the number of layers; 0: not", ge=0)

    def inner(self, dim: int) -> int:
        """I, the width of x, z and y."""
        return int(dim * self.expand)

    def heads(self, dim: int) -> int:
        """H."""
        return self.inner(dim) // self.headdim

    def convolved(self, dim: int) -> int:
        """C = I + 2 N, the channels of x, B and C."""
        return self.inner(dim) + 2 * self.d_state
