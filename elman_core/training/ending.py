"""How a training ends otherwise than well, and its figures at the end: what the manifest and diverged.json say."""

from __future__ import annotations

import logging
import math
import os
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elman_core.registry import DivergedError, ElmanError, OutOfMemoryError, RankError, StorageError

from .agreement import signal_name
from .divergence import first_bad
from .run import bury, now, read_metrics
from .step import StepValues, Windows
from .storage import write_json

if TYPE_CHECKING:
    from .loop import Trainer

log = logging.getLogger("elman_core")


def diverged(run: Trainer, windows: Windows, values: StepValues) -> DivergedError:
    """The error for a step whose values are not finite; writes diverged.json. Every rank calls it, having the same values."""
    with run._uncompiled():
        here = run.compute.where_it_failed(windows, again=bool(run.launched))
    found = next(filter(None, run.ranks.gather(here)), None)
    run.launched.clear()  # they updated nothing
    loss, grad_norm, step = values.loss, values.grad_norm, run.step + 1
    batch = {"offsets": run.windows.offsets(run.step).tolist(), "chunk_size": run.settings.train.chunk_size}
    what = f"training diverged in step {step}: loss {loss}, gradient norm {grad_norm}"
    return _reported(run, step, what, found or "a loss term", loss=str(loss), grad_norm=str(grad_norm), batch=batch)


def bad_evaluation(run: Trainer, result: Mapping[str, Any]) -> DivergedError:
    """The error for weights whose held-out loss is not finite; writes diverged.json. Every rank calls it, having the same."""
    for forward in (lambda: None, run.evaluate):  # an evaluation needs every rank, so none may have found it before
        here = run.ranks.gather(first_bad(run.model, forward, gradients=False))
        if found := next(filter(None, here), None):
            break
    what = f"training diverged by step {run.step}: held-out loss {result['loss']}"
    return _reported(run, run.step, what, found or "the loss", held_out_loss=str(result["loss"]))


def _reported(run: Trainer, step: int, what: str, found: Mapping[str, str] | str, **facts: Any) -> DivergedError:
    """The error, once diverged.json has its details."""
    where = found if isinstance(found, str) else f"{found['kind']} {found['name']}"
    report = {
        "step": step,
        **facts,
        "first_non_finite": None if isinstance(found, str) else found,
        "history": [{k: v if math.isfinite(v) else str(v) for k, v in h.items()} for h in run.history],
        "last_checkpoint": str(run.saved[1]) if run.saved[1] else None,
    }
    details = f"{run.path / 'diverged.json'} has the details"
    try:
        run.ranks.first(lambda: write_json(run.path / "diverged.json", report))
    except StorageError as second:  # that it diverged matters more
        details = str(second)
    error = DivergedError(f"{what}; first not finite: {where}. {details}; try a lower train.lr or more train.warmup")
    error.everywhere, error.step = run.ranks.size > 1, step
    return error


def write_down(run: Trainer, error: BaseException) -> None:
    """Say in the manifest what ended the run. Whatever ended it is what the caller hears of, not a second failure here."""
    status = "crashed"
    if isinstance(error, DivergedError):
        status = f"diverged@{error.step or run.step + 1}"
    elif isinstance(error, OutOfMemoryError):
        status = "oom"
    elif isinstance(error, KeyboardInterrupt):
        status = "incomplete"
    try:
        run.folder.update(status=status, ended=now(), steps_done=run.step, error=str(error) or type(error).__name__)
        run.folder.log(f"{status}: {error}")
        if run.ranks.rank and isinstance(error, RankError):
            bury(run.path, str(error))
    except (ElmanError, OSError) as second:
        error.add_note(f"and the manifest could not be written: {second}")


def silent(run: Trainer, seconds: float) -> None:
    """Nothing has moved for so long: this process waits, inside a library, for one that is gone. Ends it."""
    said = f"no step, evaluation or checkpoint has ended for {seconds:.0f} s: a rank has ended or does not answer"
    write_down(run, RankError(said))
    log.error("elman: %s", said)
    os._exit(RankError.exit_code)


def stuck(run: Trainer, signum: int) -> None:
    """A signal came and no step has ended since: this process waits for one that is gone, and its launcher will end it."""
    said = f"{signal_name(signum)} while waiting for another rank"
    run.folder.update(status="killed", ended=now(), steps_done=run.step, error=said)


def summary(path: Path) -> dict[str, Any]:
    """The figures of a run: held-out bits per byte (last), mean loss of the last 100 steps, median tok/s, peak memory."""
    lines = read_metrics(path)
    steps = [line for line in lines if line["kind"] == "step"]
    evaluations = [line for line in lines if line["kind"] == "evaluation"]
    figures: dict[str, Any] = {}
    if evaluations:
        figures["bits_per_byte"] = evaluations[-1]["bits_per_byte"]
        figures["evaluated_at"] = evaluations[-1]["step"]
    if steps:
        figures["loss_last_100_steps"] = statistics.fmean(line["loss"] for line in steps[-100:])
        figures["tok_s"] = statistics.median(line["tok_s"] for line in steps[len(steps) // 10 :])
        figures["peak_memory"] = max(line["memory"] for line in steps)
        figures["bytes_seen"] = steps[-1]["bytes_seen"]
    return figures
