"""The recurrences of E73 on every back end."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from elman_core.kernels import Maps, MatrixKernel

from . import reference


def kernel(form: str, cell: str, step: Callable[..., Any], **parts: Any) -> MatrixKernel:
    """That of one form."""
    header = Path(__file__).parent / "csrc" / "e73_cell.h"
    return MatrixKernel(f"e73_{form}", header=header, cell=f"elman::e73::{cell}", reference=step, **parts)


column = kernel("column", "Cell<true, false>", reference.column, vectors=("z",))
row = kernel("row", "Cell<false, true>", reference.row, lines=("logit",))
full = kernel("full", "Cell<true, true>", reference.full, vectors=("z",), lines=("logit",))
delta = kernel("delta", "Delta", reference.delta, vectors=("z",), maps=(Maps((), ("k",)),))
