"""Training on one device or several: settings, optimizers, schedules, exact resume, runs as folders.

`start(settings, out).fit()` trains; `resume(path)` continues. `settings` alone needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .settings import DataSettings, ModelSettings, Settings, TrainSettings

if TYPE_CHECKING:
    from .loop import Result, Trainer
    from .start import resume, start

__all__ = ["DataSettings", "ModelSettings", "Result", "Settings", "TrainSettings", "Trainer", "resume", "start"]

_HOME = {"Result": "loop", "Trainer": "loop", "start": "start", "resume": "start"}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
