"""The recurrence of E34 on every back end."""

from pathlib import Path

from elman_core.kernels import ElementwiseKernel

from .reference import step

e34 = ElementwiseKernel(
    "e34", header=Path(__file__).parent / "csrc" / "e34_cell.h", step=step, streams=("u",), vectors=("delta",)
)
