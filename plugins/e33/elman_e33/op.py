"""The recurrence of E33 on every back end."""

from pathlib import Path

from elman_core.kernels import DenseKernel
from elman_core.nn import self_gate

from .reference import e33_reference

e33 = DenseKernel(
    "e33",
    header=Path(__file__).parent / "csrc" / "e33_cell.h",
    reference=e33_reference,
    update=lambda a, _h: a.tanh(),
    readout=lambda h, _h: self_gate(h),
)
