"""The recurrence of `x_gated` on every back end."""

from pathlib import Path

import torch.nn.functional as F

from elman_core.kernels import DenseKernel

from .reference import x_gated_reference

x_gated = DenseKernel(
    "x_gated",
    header=Path(__file__).parent / "csrc" / "x_gated_cell.h",
    reference=x_gated_reference,
    update=lambda a, _h, _m: a.tanh(),
    readout=lambda h, _h, m: h * F.silu(m),
    extras=("m",),
)
