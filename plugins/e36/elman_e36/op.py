"""The recurrence of E36 on every back end."""

from pathlib import Path

from elman_core.kernels import DenseKernel
from elman_core.nn import self_gate

from .reference import e36_reference

e36 = DenseKernel(
    "e36",
    header=Path(__file__).parent / "csrc" / "e36_cell.h",
    reference=e36_reference,
    readout=lambda h, _h: self_gate(h),
)
