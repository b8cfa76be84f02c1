"""The recurrences of E68 on every back end."""

from pathlib import Path
from typing import Any

from elman_core.kernels import ElementwiseKernel

from .reference import step, step_i

PARTS: dict[str, Any] = {
    "header": Path(__file__).parent / "csrc" / "e68_cell.h",
    "streams": ("a", "k"),
    "vectors": ("delta", "b_g"),
}
e68 = ElementwiseKernel("e68", cell="elman::e68::Cell<false>", step=step, **PARTS)
e68i = ElementwiseKernel("e68i", cell="elman::e68::Cell<true>", step=step_i, **PARTS)
