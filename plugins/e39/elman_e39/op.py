"""The recurrence of E39 on every back end."""

from pathlib import Path

from elman_core.kernels import DenseKernel
from elman_core.nn import self_gate

from .reference import e39_reference

e39 = DenseKernel(
    "e39",
    header=Path(__file__).parent / "csrc" / "e39_cell.h",
    reference=e39_reference,
    update=lambda a, _h: a.tanh(),
    readout=lambda h, _h: self_gate(h),
)
