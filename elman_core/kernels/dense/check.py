"""What a dense op takes: shapes, dtypes and devices that fit together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from elman_core.kernels.runtime import DTYPE_CODES, compute_dtype
from elman_core.registry.errors import ConfigError


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
    if u.dtype not in DTYPE_CODES:
        raise ConfigError(f"{kernel}: u must be float32, bfloat16, float16 or float64, not {u.dtype}")
    if u.dim() != 3 or u.numel() == 0:
        raise ConfigError(f"{kernel}: u must be (T, B, d) with every size at least 1, not {tuple(u.shape)}")
    steps, rows, width = u.shape
    device, same, either = u.device, (u.dtype,), (u.dtype, compute_dtype(u))

    def check(name: str, x: Tensor | None, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
        if isinstance(x, Tensor) and x.shape == shape and x.dtype in dtypes and x.device == device:
            return
        if not isinstance(x, Tensor):
            raise ConfigError(f"{kernel}: {name} must be a tensor {shape}, not {x!r}")
        if x.shape != shape:
            raise ConfigError(f"{kernel}: {name} must be {shape} beside u {tuple(u.shape)}, not {tuple(x.shape)}")
        if x.dtype not in dtypes:
            wanted = " or ".join(sorted({str(d).removeprefix("torch.") for d in dtypes}))
            raise ConfigError(f"{kernel}: {name} must be {wanted} beside u in {u.dtype}, not {x.dtype}")
        raise ConfigError(f"{kernel}: {name} is on {x.device}, u on {device}; move them together")

    for name, extra in zip(names, extras, strict=True):
        check(name, extra, (steps, rows, width), same)
    check("w", w, (width, width), either)
    check("h0", h0, (rows, width), either)
    if mask is not None:
        check("mask", mask, (steps, rows), (torch.bool,))
    if starts is not None:
        check("starts", starts, (steps, rows), (torch.bool,))
