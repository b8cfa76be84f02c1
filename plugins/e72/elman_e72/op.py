"""The recurrence of E72 on every back end."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from elman_core.kernels import Maps, MatrixKernel

from .reference import e72_reference

UNIT_KEYS = Maps((), ("k",))


def _keep_signs(inputs: dict[str, Any], options: Mapping[str, Any]) -> None:
    """|r| has a kink at 0, where rounding would choose the gradient: let what a column retrieves keep its sign."""
    if options.get("inverse"):
        inputs["k"] = inputs["k"].abs()
        for name in ("v", "S0"):
            if (x := inputs[name]) is not None:
                inputs[name] = x.abs() * (1 - 2 * (torch.arange(x.shape[-1]) % 2)).to(x)


e72 = MatrixKernel(
    "e72",
    header=Path(__file__).parent / "csrc" / "e72_cell.h",
    reference=e72_reference,
    lines=("alpha",),
    params=("d_g", "b_g", "b_alpha"),
    options=("inverse",),
    maps=(Maps(), UNIT_KEYS),
    adjust=_keep_signs,
)
