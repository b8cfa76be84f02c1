"""All tasks, by name."""

from . import languages, recall  # they register themselves
from .task import TASKS, Drawn, Task, find

__all__ = ["TASKS", "Drawn", "Task", "find", "languages", "recall"]
