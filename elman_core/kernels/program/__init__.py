"""Work recorded as a list of tensor operations at fixed addresses, and repeated on a CPU without Python."""

from .recorder import CpuRecorder, is_built, recorder_when_built
from .rows import Batch, Recorded, RowsProgram
from .tape import Operation, Tape, tensors

__all__ = [
    "Batch", "CpuRecorder", "Operation", "Recorded", "RowsProgram", "Tape", "is_built", "recorder_when_built", "tensors",
]  # fmt: skip
