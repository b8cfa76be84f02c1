"""The recurrence of E1 on every back end."""

from pathlib import Path

import torch.nn.functional as F

from elman_core.kernels import DenseKernel

from .reference import e1_reference

e1 = DenseKernel(
    "e1",
    header=Path(__file__).parent / "csrc" / "e1_cell.h",
    reference=e1_reference,
    update=lambda a, _h, _z: a.tanh(),
    readout=lambda h, _h, z: h * F.silu(z),
    extras=("z",),
)
