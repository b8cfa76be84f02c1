"""The recurrence of {{Name}} on every back end."""

from pathlib import Path

from elman_core.kernels import GatesKernel

from .reference import step

HEADER = Path(__file__).parent / "csrc" / "{{name}}_cell.h"
{{name}} = GatesKernel("{{name}}", header=HEADER, step=step, gates=2, kept=2)
