"""The recurrence of E14 on every back end."""

from pathlib import Path

from elman_core.kernels import MatrixKernel

from .reference import e14_reference

e14 = MatrixKernel(
    "e14",
    header=Path(__file__).parent / "csrc" / "e14_cell.h",
    reference=e14_reference,
    lines=("decay",),
    shared=("v", "decay"),
)
