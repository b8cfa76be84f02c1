"""The recurrence of {{Name}} on every back end."""

from pathlib import Path

from elman_core.kernels import ElementwiseKernel

from .reference import step

HEADER = Path(__file__).parent / "csrc" / "{{name}}_cell.h"
{{name}} = ElementwiseKernel("{{name}}", header=HEADER, step=step, streams=("f", "c"), vectors=("r",), states=("h",))
