"""The recurrences of E61 on every back end."""

from pathlib import Path

from elman_core.kernels import ElementwiseKernel

from .reference import step, step_b, step_tanh

HEADER = Path(__file__).parent / "csrc" / "e61_cell.h"
e61 = ElementwiseKernel("e61", header=HEADER, cell="elman::e61::A", step=step, streams=("a", "k"))
e61b = ElementwiseKernel("e61b", header=HEADER, cell="elman::e61::B", step=step_b, streams=("a", "k"))
e61_tanh = ElementwiseKernel("e61_tanh", header=HEADER, cell="elman::e61::Tanh", step=step_tanh, streams=("a", "k"))
