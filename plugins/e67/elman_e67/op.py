"""The recurrences of E67 on every back end."""

from pathlib import Path

from elman_core.kernels import DenseKernel, ElementwiseKernel
from elman_core.nn import dense_reference, self_gate

from .reference import step, step_lr

CSRC = Path(__file__).parent / "csrc"
e67 = ElementwiseKernel("e67", header=CSRC / "e67_cell.h", step=step, streams=("a", "v"), vectors=("delta",))
e67lr = DenseKernel(
    "e67lr",
    header=CSRC / "e67lr_cell.h",
    reference=dense_reference(step_lr),
    update=lambda a, h, v: step_lr(a, h, v)[0],
    readout=lambda h, _h, _v: self_gate(h),
    extras=("k",),
    uses_a=True,
)
