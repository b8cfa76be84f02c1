"""The options of Gated DeltaNet, what can be built, and how many parameters it has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from elman_core import ConfigError, option


@dataclass(frozen=True)
class GDNConfig:
    expand_v: float = option(2.0, "width of a value / width of a key", gt=0, le=8)
    head_dim: int = option(128, "width K of a query and key, the rows of a head's state", ge=1, le=256)
    n_heads: int = option(0, "number H of heads; 0: as many as the model's width has room for", ge=0, le=1024)
    d_conv: int = option(4, "width of the causal convolutions of q, k and v", ge=2, le=8)
    init: Literal["normal", "linear"] = option("normal", "maps and convolutions: N(0, 0.02), or as torch starts them")

    def heads(self, dim: int) -> int:
        """H."""
        return self.n_heads or dim // self.head_dim

    @property
    def values(self) -> int:
        """V, the width of one head's value, the columns of its state."""
        return int(self.head_dim * self.expand_v)


def validate(dim: int, config: GDNConfig) -> None:
    """Raises `ConfigError` unless a value has a whole width and there is a head that the width has room for."""
    wide = config.head_dim * config.expand_v
    if wide != config.values or not config.values:
        near = max(1, round(wide)) / config.head_dim
        raise ConfigError(
            f"head_dim {config.head_dim} x expand_v {config.expand_v:g} = {wide:g}, not a whole width; nearest: expand_v "
            f"{near:.10g}"
        )
    if not config.n_heads and dim % config.head_dim:
        low, high = dim // config.head_dim * config.head_dim, -(-dim // config.head_dim) * config.head_dim
        near_width = f"{low} or {high}" if low else f"{high}"
        raise ConfigError(
            f"width {dim} is not a multiple of head_dim {config.head_dim}: set n_heads; nearest width: {near_width}"
        )


def param_count(dim: int, config: GDNConfig) -> int:
    """2 D H K + 3 D H V + 2 D H + 2 H + d_conv (2 H K + H V) + V."""
    heads = config.heads(dim)
    keys, values = heads * config.head_dim, heads * config.values
    maps = dim * (2 * keys + 3 * values + 2 * heads)
    return maps + 2 * heads + config.d_conv * (2 * keys + values) + config.values
