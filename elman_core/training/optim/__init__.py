"""Optimizers, whose state is tensors and plain numbers, and the schedule of the learning rate."""

from .optimizer import Optimizer
from .schedule import Schedule

__all__ = ["Optimizer", "Schedule"]
