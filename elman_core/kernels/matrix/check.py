"""What the matrix-state op takes: shapes, dtypes and devices that fit together."""

from __future__ import annotations

import torch
from torch import Tensor

from elman_core.kernels.runtime import DTYPE_CODES
from elman_core.registry.errors import ConfigError


def check_tensors(
    kernel: str, like: Tensor, tokens: tuple[int, ...], state_shape: tuple[int, ...], state: Tensor | None,
    mask: Tensor | None, starts: Tensor | None, **named: tuple[Tensor | None, tuple[int, ...]],
) -> None:  # fmt: skip
    """Compare what was given with what stands beside `like`, which is q or the packed inputs.

    Args:
        kernel: its name. tokens: (B, T, H). state, state_shape: S_0 and what it must be. named: name = (tensor, shape).

    Raises:
        ConfigError: the first that does not fit.
    """
    first = "q" if like.dim() == 4 else "packed"
    if like.dtype not in DTYPE_CODES:
        raise ConfigError(f"{kernel}: {first} must be float32, bfloat16, float16 or float64, not {like.dtype}")
    flags = {"mask": (mask, tokens[:2]), "starts": (starts, tokens[:2])}
    named |= {"S0": (state, state_shape), **flags}
    for name, (x, shape) in named.items():
        if x is None:
            continue
        if not isinstance(x, Tensor) or x.shape != shape:
            given = tuple(x.shape) if isinstance(x, Tensor) else repr(x)
            raise ConfigError(f"{kernel}: {name} must be {shape} beside {first} {tuple(like.shape)}, not {given}")
        if x.device != like.device:
            raise ConfigError(f"{kernel}: {name} is on {x.device}, {first} on {like.device}; move them together")
        if name in flags and x.dtype != torch.bool:
            raise ConfigError(f"{kernel}: {name} must be bool, not {x.dtype}")
        if name not in flags and x.dtype not in DTYPE_CODES:
            raise ConfigError(f"{kernel}: {name} must be floating point beside {first}, not {x.dtype}")
