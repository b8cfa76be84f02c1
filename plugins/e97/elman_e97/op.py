"""The recurrences of E97 on every back end."""

from pathlib import Path
from typing import Any

from elman_core.kernels import Maps, MatrixKernel

from .reference import e97_raw_reference, e97_reference

PARTS: dict[str, Any] = {
    "header": Path(__file__).parent / "csrc" / "e97_cell.h",
    "lines": ("w",),
    "scalars": ("decay", "write"),
    "optional": ("write",),
    "options": ("linear_state",),
    "maps": (
        Maps(("q", "k", "v"), ("q", "k"), ("mamba", "sigmoid")),
        Maps((), ("q", "k"), ("sigmoid", "sigmoid")),
        Maps(("q", "k", "v"), (), ("given", "sigmoid")),
    ),
}
e97 = MatrixKernel("e97", reference=e97_reference, vectors=("erase",), **PARTS)
e97_raw = MatrixKernel("e97_raw", cell="elman::e97::RawCell", reference=e97_raw_reference, **PARTS)
