"""What a dense op takes: shapes, dtypes and devices that fit together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from elman_core.registry.errors import ConfigError

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_tensors(
    kernel: str,
    names: Sequence[str],
    u: Tensor,
    extras: Sequence[Tensor | None],
    w: Tensor | None,
    h0: Tensor | None,
    mask: Tensor | None,
    starts: Tensor | None = None,
) -> None:
    """Compare what was given with what stands beside u.

    Args:
        kernel: its name. names: of the extras.

    Raises:
        ConfigError: the first that does not fit.
    """
    if u.dtype not in DTYPES:
        raise ConfigError(f"{kernel}: u must be float32, bfloat16, float16 or float64, not {u.dtype}")
    if u.dim() != 3 or u.numel() == 0:
        raise ConfigError(f"{kernel}: u must be (T, B, d) with every size at least 1, not {tuple(u.shape)}")
    steps, rows, width = u.shape
    state = torch.float64 if u.dtype == torch.float64 else torch.float32
    same = {u.dtype}
    wanted: list[tuple[str, Tensor | None, tuple[int, ...], set[torch.dtype]]] = [
        *((name, e, (steps, rows, width), same) for name, e in zip(names, extras, strict=True)),
        ("w", w, (width, width), same | {state}),
        ("h0", h0, (rows, width), same | {state}),
    ]
    flags = (("mask", mask), ("starts", starts))
    wanted += [(name, x, (steps, rows), {torch.bool}) for name, x in flags if x is not None]
    for name, x, shape, dtypes in wanted:
        if not isinstance(x, Tensor):
            raise ConfigError(f"{kernel}: {name} must be a tensor {shape}, not {x!r}")
        if x.shape != shape:
            raise ConfigError(f"{kernel}: {name} must be {shape} beside u {tuple(u.shape)}, not {tuple(x.shape)}")
        if x.dtype not in dtypes:
            wanted_dtypes = " or ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
            raise ConfigError(f"{kernel}: {name} must be {wanted_dtypes} beside u in {u.dtype}, not {x.dtype}")
        if x.device != u.device:
            raise ConfigError(f"{kernel}: {name} is on {x.device}, u on {u.device}; move them together")
