"""The recurrence of E75 on every back end."""

from pathlib import Path

from elman_core.kernels import Maps, MatrixKernel

from .reference import e75_reference

e75 = MatrixKernel(
    "e75",
    header=Path(__file__).parent / "csrc" / "e75_cell.h",
    reference=e75_reference,
    lines=("beta",),
    params=("b_beta",),
    options=("linear_state",),
    maps=(Maps((), ("k",)),),
)
