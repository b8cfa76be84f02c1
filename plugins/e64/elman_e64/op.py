"""The recurrence of E64 on every back end."""

from pathlib import Path

from elman_core.kernels import ElementwiseKernel

from .reference import step

e64 = ElementwiseKernel("e64", header=Path(__file__).parent / "csrc" / "e64_cell.h", step=step, streams=("a", "k"))
