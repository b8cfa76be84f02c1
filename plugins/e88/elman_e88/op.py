"""The recurrence of E88 on every back end."""

from pathlib import Path

from elman_core.kernels import MatrixKernel

from .reference import e88_reference

e88 = MatrixKernel("e88", header=Path(__file__).parent / "csrc" / "e88_cell.h", reference=e88_reference)
