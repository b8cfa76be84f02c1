"""Training on one device or several: settings, optimizers, schedules, exact resume, runs as folders.

`start(settings, out).fit()` trains; `resume(path)` continues. `settings` alone needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elman_core.imports import when_asked

from .settings import DataSettings, ModelSettings, Settings, TrainSettings

if TYPE_CHECKING:
    from .loop import Result, Trainer
    from .start import resume, start

__all__ = ["DataSettings", "ModelSettings", "Result", "Settings", "TrainSettings", "Trainer", "resume", "start"]

__getattr__ = when_asked(__name__)
