"""The recurrence of E2's slots on every back end."""

from pathlib import Path

from elman_core.kernels import DenseKernel

from .reference import e2_reference

e2 = DenseKernel(
    "e2",
    header=Path(__file__).parent / "csrc" / "e2_cell.h",
    reference=e2_reference,
    update=lambda a, _h: a.tanh(),
    readout=lambda h, _h: h,
    blocks=True,
)
