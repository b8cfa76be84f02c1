"""The recurrence of E4 on every back end."""

from pathlib import Path

import torch.nn.functional as F

from elman_core.kernels import DenseKernel

from .reference import e4_reference

e4 = DenseKernel(
    "e4",
    header=Path(__file__).parent / "csrc" / "e4_cell.h",
    reference=e4_reference,
    update=lambda a, _h, _z: a.tanh(),
    readout=lambda h, _h, z: h * F.silu(z),
    extras=("z",),
)
