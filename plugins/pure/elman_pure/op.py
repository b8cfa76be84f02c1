"""The recurrence of `pure` on every back end."""

from pathlib import Path

from elman_core.kernels import DenseKernel

from .reference import pure_reference

pure = DenseKernel(
    "pure",
    header=Path(__file__).parent / "csrc" / "pure_cell.h",
    reference=pure_reference,
    update=lambda a, _h: a.tanh(),
    readout=lambda h, _h: h,
)
