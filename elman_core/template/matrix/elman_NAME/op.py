"""The recurrence of {{Name}} on every back end."""

from pathlib import Path

from elman_core.kernels import Maps, MatrixKernel

from .reference import {{name}}_reference

{{name}} = MatrixKernel(
    "{{name}}",
    header=Path(__file__).parent / "csrc" / "{{name}}_cell.h",
    reference={{name}}_reference,
    lines=("beta",),
    maps=(Maps(normalised=("k",)),),
)
