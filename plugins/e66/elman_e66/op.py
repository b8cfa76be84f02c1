"""The recurrence of E66 on every back end."""

from pathlib import Path

import torch

from elman_core.kernels import DenseKernel
from elman_core.nn import self_gate

from .reference import e66_reference

e66 = DenseKernel(
    "e66",
    header=Path(__file__).parent / "csrc" / "e66_cell.h",
    reference=e66_reference,
    update=lambda a, h, alpha: torch.sigmoid(alpha) * h + torch.sigmoid(-alpha) * a.tanh(),
    readout=lambda h, _h, _alpha: self_gate(h),
    extras=("alpha",),
    uses_a=True,
)
