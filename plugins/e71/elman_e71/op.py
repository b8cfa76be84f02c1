"""The recurrence of E71 on every back end."""

from pathlib import Path

from elman_core.kernels import Maps, MatrixKernel

from .reference import e71_reference

UNIT_KEYS = Maps((), ("k",))

e71 = MatrixKernel(
    "e71",
    header=Path(__file__).parent / "csrc" / "e71_cell.h",
    reference=e71_reference,
    lines=("alpha",),
    params=("d_alpha", "b_alpha"),
    maps=(Maps(), UNIT_KEYS),
)
