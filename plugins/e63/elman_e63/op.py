"""The recurrences of E63's forms on every back end."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elman_core.kernels import DenseKernel, GatesKernel
from elman_core.nn import self_gate

from .reference import e63_reference, e63b_reference, e63d_reference

HEADER = Path(__file__).parent / "csrc" / "e63_cell.h"


def _step_c(p: tuple[Tensor, ...], u: tuple[Tensor, ...], h: Tensor) -> tuple[Tensor, ...]:
    a, alpha, beta = (x + y for x, y in zip(p, u, strict=True))
    return (torch.sigmoid(alpha) * h + torch.sigmoid(beta) * a.tanh(),)


KERNELS: dict[str, Any] = {
    "a": DenseKernel(
        "e63",
        header=HEADER,
        reference=e63_reference,
        update=lambda a, h, alpha: torch.sigmoid(alpha) * h + torch.sigmoid(-alpha) * a.tanh(),
        readout=lambda h, _h, _alpha: self_gate(h),
        extras=("alpha",),
        uses_a=True,
    ),
    "b": DenseKernel(
        "e63b",
        header=HEADER,
        cell="elman::e63::CellB",
        reference=e63b_reference,
        update=lambda a, h, alpha, beta: torch.sigmoid(alpha) * h + torch.sigmoid(beta) * a.tanh(),
        readout=lambda h, _h, _alpha, _beta: self_gate(h),
        extras=("alpha", "beta"),
        uses_a=True,
    ),
    "c": GatesKernel(  # u and W: of the candidate, alpha and beta
        "e63c", header=HEADER.with_name("e63c_cell.h"), cell="elman::e63::CellC", step=_step_c, gates=3, kept=3
    ),
    "d": DenseKernel(
        "e63d",
        header=HEADER,
        cell="elman::e63::CellD",
        reference=e63d_reference,
        accumulates="alpha",
        update=lambda a, h, alpha: h + torch.sigmoid(alpha) * a.tanh(),
        readout=lambda h, _h, _alpha: self_gate(h),
        extras=("alpha",),
        uses_a=True,
    ),
}
