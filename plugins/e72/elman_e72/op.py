"""The recurrence of E72 on every back end."""

from pathlib import Path

from elman_core.kernels import Maps, MatrixKernel

from .reference import e72_reference

UNIT_KEYS = Maps((), ("k",))

e72 = MatrixKernel(
    "e72",
    header=Path(__file__).parent / "csrc" / "e72_cell.h",
    reference=e72_reference,
    lines=("alpha",),
    params=("d_g", "b_g", "b_alpha"),
    options=("inverse",),
    maps=(Maps(), UNIT_KEYS),
)
