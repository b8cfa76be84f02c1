"""The recurrence of {{Name}} on every back end."""

from pathlib import Path

from elman_core.kernels import DenseKernel

from .reference import {{name}}_reference

{{name}} = DenseKernel(
    "{{name}}",
    header=Path(__file__).parent / "csrc" / "{{name}}_cell.h",
    reference={{name}}_reference,
    update=lambda a, _h: a.tanh(),
    readout=lambda h, _h: h,
)
