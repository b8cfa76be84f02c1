"""Every figure of a training as TensorBoard event files, in the run's own folder: `tensorboard --logdir runs`.

A logger: it observes the runs whose setting `train.loggers` names it, and changes nothing.
"""

from __future__ import annotations

import json
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from elman_core import hookimpl

FOLDER = "tensorboard"

_writers: dict[Any, SummaryWriter] = {}  # by run: a process may train several


@hookimpl
def elman_run_start(run: Any) -> None:
    """Open a writer, and hide what an earlier process wrote after the checkpoint from which this one continues."""
    writer = SummaryWriter(str(run.path / FOLDER), purge_step=run.step + 1)
    if run.step == 0:
        writer.add_text("settings", f"```json\n{json.dumps(run.settings.to_dict(), indent=2)}\n```", 0)
    _writers[run.path] = writer


@hookimpl
def elman_step_end(run: Any, step: int, metrics: Any) -> None:
    """The writer has its own thread, so a step does not wait for the disk."""
    for name, value in metrics.items():
        if name != "step":
            _writers[run.path].add_scalar(f"train/{name}", value, step)


@hookimpl
def elman_evaluation_end(run: Any, result: Any) -> None:
    for name in ("loss", "bits_per_byte"):
        _writers[run.path].add_scalar(f"heldout/{name}", result[name], result["step"])


@hookimpl
def elman_checkpoint_saved(run: Any) -> None:
    """Flush, so that the curves on disk reach as far as the checkpoint."""
    _writers[run.path].flush()


@hookimpl
def elman_run_end(run: Any) -> None:
    if run.path in _writers:  # a run may end before it has begun
        _writers.pop(run.path).close()
