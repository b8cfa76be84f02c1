"""The recurrence: the one place that chooses an implementation. T time, B batch, d inner width."""

from pathlib import Path

from elman_core.kernels import DenseKernel

from .reference import {{name}}_reference

{{name}} = DenseKernel(
    "{{name}}",
    header=Path(__file__).parent / "csrc" / "{{name}}_cell.h",
    cell="elman::{{name}}::Cell",
    reference={{name}}_reference,
    update=lambda a, _h: a.tanh(),
    readout=lambda h, _h: h,
)
