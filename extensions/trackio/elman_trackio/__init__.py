"""Every figure of a training in trackio's dashboard on this machine: `trackio show --project elman`.

A logger: it observes the runs whose setting `train.loggers` names it. trackio keeps its files on this machine and
sends nothing.
"""

from __future__ import annotations

from typing import Any

import trackio

from elman_core import hookimpl

PROJECT = "elman"

_curves: dict[Any, Any] = {}  # by run: a process may train several


@hookimpl
def elman_run_start(run: Any) -> None:
    """A run is named after its folder and its id, so a resumed run appends to its own curves and to no other folder's."""
    settings = {
        f"{table}.{key}": value for table, part in run.settings.to_dict().items() for key, value in part.items()
    }
    settings["parameters"] = run.manifest["parameters"]
    name = f"{run.path.name}-{run.manifest['id'][:8]}"
    _curves[run.path] = trackio.init(project=PROJECT, name=name, config=settings, resume="allow")


@hookimpl
def elman_step_end(run: Any, step: int, metrics: Any) -> None:
    figures = {f"train/{name}": value for name, value in metrics.items() if name != "step"}
    _curves[run.path].log(figures, step=step)


@hookimpl
def elman_evaluation_end(run: Any, result: Any) -> None:
    figures = {f"heldout/{name}": result[name] for name in ("loss", "bits_per_byte")}
    _curves[run.path].log(figures, step=result["step"])


@hookimpl
def elman_run_end(run: Any) -> None:
    if run.path in _curves:  # a run may end before it has begun
        _curves.pop(run.path).finish()
