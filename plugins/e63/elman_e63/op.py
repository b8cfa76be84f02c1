"""The recurrences of E63's forms on every back end."""

from pathlib import Path

import torch

from elman_core.kernels import DenseKernel
from elman_core.nn import self_gate

from .reference import e63_reference, e63b_reference, e63d_reference

HEADER = Path(__file__).parent / "csrc" / "e63_cell.h"

KERNELS = {
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
