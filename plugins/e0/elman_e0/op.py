"""The recurrence of E0 on every back end, with either gate."""

from pathlib import Path

import torch.nn.functional as F

from elman_core.kernels import DenseKernel

from .reference import e0_reference, e0_wgate_reference

HEADER = Path(__file__).parent / "csrc" / "e0_cell.h"

e0 = DenseKernel(
    "e0",
    header=HEADER,
    reference=e0_reference,
    update=lambda a, _h, _m: a.tanh(),
    readout=lambda h, _h, m: h * F.silu(h + m),
    extras=("m",),
)
e0_wgate = DenseKernel(
    "e0_wgate",
    header=HEADER,
    cell="elman::e0::Projected",
    reference=e0_wgate_reference,
    update=lambda a, _h, _m: a.tanh(),
    readout=lambda h, _h, m: h * F.silu(m),
    extras=("m",),
)
