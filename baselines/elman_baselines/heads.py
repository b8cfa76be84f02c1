"""Widths that heads fill."""

from __future__ import annotations

from elman_core import ConfigError


def need_whole_heads(dim: int, head_dim: int, instead: str = "") -> None:
    """Raises `ConfigError` unless a width is a multiple of head_dim. instead: what helps besides another width."""
    if dim % head_dim:
        low = dim // head_dim * head_dim
        near = f"{low} or {low + head_dim}" if low else f"{head_dim}"
        raise ConfigError(f"width {dim} is not a multiple of head_dim {head_dim}{instead}; nearest width: {near}")
