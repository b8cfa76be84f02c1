"""The recurrences of E62 on every back end."""

from pathlib import Path

from elman_core.kernels import ElementwiseKernel

from .reference import step, step_b

HEADER = Path(__file__).parent / "csrc" / "e62_cell.h"
e62 = ElementwiseKernel("e62", header=HEADER, cell="elman::e62::A", step=step, streams=("k", "v"))
e62b = ElementwiseKernel("e62b", header=HEADER, cell="elman::e62::B", step=step_b, streams=("k", "alpha", "v"))
