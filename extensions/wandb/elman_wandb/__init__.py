"""Every figure of a training in Weights & Biases, offline unless WANDB_MODE=online.

A logger: it observes the runs whose setting `train.loggers` names it, and changes nothing.
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # read by the import: nothing is sent that nobody asked for
import wandb

from elman_core import hookimpl

_curves: dict[Any, Any] = {}  # by run: a process may train several


@hookimpl
def elman_run_start(run: Any) -> None:
    """The id is the run's own, so a resumed run goes on in its curves, also where its folder was moved or renamed."""
    mode: Any = os.environ.get("WANDB_MODE", "offline")  # one that wandb does not know is its error
    _curves[run.path] = curves = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "elman"),
        id=run.manifest["id"],
        name=run.path.name,
        config={**run.settings.to_dict(), "parameters": run.manifest["parameters"]},
        dir=str(run.path),
        mode=mode,
        resume="allow",
        allow_val_change=True,  # steps, after --steps +N
        reinit="create_new",
        settings=wandb.Settings(silent=True, console="off"),
    )
    curves.define_metric("*", step_metric="step")


@hookimpl
def elman_step_end(run: Any, step: int, metrics: Any) -> None:
    figures = {f"train/{name}": value for name, value in metrics.items() if name != "step"}
    _curves[run.path].log({"step": step, **figures})


@hookimpl
def elman_evaluation_end(run: Any, result: Any) -> None:
    figures = {f"heldout/{name}": result[name] for name in ("loss", "bits_per_byte")}
    _curves[run.path].log({"step": result["step"], **figures})


@hookimpl
def elman_run_end(run: Any, error: BaseException | None) -> None:
    if run.path in _curves:  # a run may end before it has begun
        _curves.pop(run.path).finish(exit_code=int(error is not None))
