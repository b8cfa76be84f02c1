"""The recurrence of E88 on every back end."""

from pathlib import Path

from elman_core.kernels import Maps, MatrixKernel

from .reference import e88_reference

e88 = MatrixKernel(
    "e88",
    header=Path(__file__).parent / "csrc" / "e88_cell.h",
    reference=e88_reference,
    scalars=("decay", "write"),
    optional=("write",),
    options=("linear_state",),
    delta=True,
    maps=(
        Maps(("q", "k", "v"), ("q", "k"), ("mamba", "sigmoid")),
        Maps((), ("q", "k"), ("sigmoid", "sigmoid")),
        Maps(("q", "k", "v"), (), ("given", "sigmoid")),
        Maps(),
    ),
)
