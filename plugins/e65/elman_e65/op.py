"""The recurrence of E65 on every back end."""

from pathlib import Path

from elman_core.kernels import ElementwiseKernel

from .reference import step

HEADER = Path(__file__).parent / "csrc" / "e65_cell.h"
e65 = ElementwiseKernel("e65", header=HEADER, step=step, streams=("a", "k"), vectors=("delta",))
