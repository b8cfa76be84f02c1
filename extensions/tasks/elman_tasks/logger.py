"""The logger `accuracy`: at each evaluation of a run on a task, the accuracy by length, in accuracy.jsonl in its folder. A run
whose mean over lengths reaches the task's `until` ends there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elman_core import hookimpl
from elman_core.extension import ConfigError

from .catalogue import find
from .score import accuracy, add, mean


@hookimpl
def elman_run_start(run: Any) -> None:
    _task(run)


@hookimpl
def elman_evaluation_end(run: Any, result: Mapping[str, float]) -> None:
    task = _task(run)
    with run.evaluating():
        tests = accuracy(run.model, task)
    add(run.path, int(result["step"]), tests)
    if mean(tests, "places") >= task.until:
        run.end_here()


def _task(run: Any) -> Any:
    name, _, options = str(run.settings.data.path).partition(":")
    if name != "task":
        raise ConfigError("the logger accuracy needs a task: --data task:NAME, or leave it out of train.loggers")
    if run.plan.parallel == "fsdp":
        raise ConfigError(
            "the logger accuracy runs the model on one process, which has a part of it: train.parallel=ddp"
        )
    return find(options)
