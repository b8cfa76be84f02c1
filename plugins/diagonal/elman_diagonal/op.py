"""The recurrences of diagonal on every back end."""

from pathlib import Path
from typing import Any

from elman_core.kernels import ElementwiseKernel

from .reference import step, step_tanh

PARTS: dict[str, Any] = {
    "header": Path(__file__).parent / "csrc" / "diagonal_cell.h",
    "streams": ("u", "x"),
    "vectors": ("alpha", "b_g"),
}
diagonal = ElementwiseKernel("diagonal", cell="elman::diagonal::Cell<false>", step=step, **PARTS)
diagonal_tanh = ElementwiseKernel("diagonal_tanh", cell="elman::diagonal::Cell<true>", step=step_tanh, **PARTS)
