"""The recurrence of E37v2 on every back end."""

from pathlib import Path

from elman_core.kernels import DenseKernel
from elman_core.nn import self_gate

from .reference import e37v2_reference

e37v2 = DenseKernel(
    "e37v2",
    header=Path(__file__).parent / "csrc" / "e37v2_cell.h",
    reference=e37v2_reference,
    update=lambda a, _h: a.tanh(),
    readout=lambda h, _h: self_gate(h),
    tied=True,
)
