"""The recurrence of E70 on every back end."""

from pathlib import Path

from elman_core.kernels import MatrixKernel

from .reference import e70_reference

e70 = MatrixKernel(
    "e70", header=Path(__file__).parent / "csrc" / "e70_cell.h", reference=e70_reference, scalars=("decay",)
)
