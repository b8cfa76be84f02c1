"""The recurrence of E56 on every back end."""

from pathlib import Path

import torch.nn.functional as F

from elman_core.kernels import DenseKernel

from .reference import e56_reference

e56 = DenseKernel(
    "e56",
    header=Path(__file__).parent / "csrc" / "e56_cell.h",
    reference=e56_reference,
    update=lambda a, _h, _z: a.tanh(),
    readout=lambda h, _h, z: h * F.silu(z),
    extras=("z",),
)
