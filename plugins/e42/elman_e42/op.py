"""The recurrence of E42 on every back end."""

from pathlib import Path

from elman_core.kernels import DenseKernel
from elman_core.nn import self_gate

from .reference import e42_reference

e42 = DenseKernel(
    "e42",
    header=Path(__file__).parent / "csrc" / "e42_cell.h",
    reference=e42_reference,
    readout=lambda h, _h: self_gate(h),
    tied=True,
)
