"""Work recorded as a list of tensor operations at fixed addresses."""

from .tape import Operation, Tape, tensors

__all__ = ["Operation", "Tape", "tensors"]
