"""Work recorded as a list of tensor operations at fixed addresses, and repeated on a CPU without Python."""

from .recorder import CpuRecorder, recorder_when_built
from .tape import Operation, Tape, tensors

__all__ = ["CpuRecorder", "Operation", "Tape", "recorder_when_built", "tensors"]
