"""How an attempt ended: its status, its figures, its last line; and the command of the next attempt."""

from __future__ import annotations

import signal
import textwrap
from collections.abc import Sequence
from typing import Any

from elman_core.extension import CheckpointError, open_regular, printable, read_json, storage_errors

from .job import CRASHED, DIVERGED, LOST, OK, OOM, OUTSIDE, PYTHON, RUNNING, TIMEOUT, Attempt, Ending, Job, status_of

ELMAN = (*PYTHON, "-m", "elman_core")
_SECONDS = len("2026-01-01T00:00:00")


def final_status(job: Job, ending: Ending, reason: str = "", since: str | None = None) -> str:
    """The status of a job whose attempt ended, from its exit code and, for a training, from its manifest.

    Args:
        reason: why the scheduler stopped it, if it did. since: when the attempt started, in ISO 8601.
    """
    if ending.status is not None:
        return ending.status
    facts = _manifest(job)
    status, manifest = status_of(ending.exit_code), str(facts.get("status", ""))
    if manifest == OK and status in (OK, *OUTSIDE):
        return OK  # complete and saved, whatever happened afterwards
    if reason == TIMEOUT:
        return TIMEOUT
    if job.run is None:
        own = status in (DIVERGED, OOM, TIMEOUT) and not _is_elman(job.command)
        return CRASHED if own else status  # in another program, 3 or 4 has another meaning
    if status == OK:
        return manifest or CRASHED
    if status == DIVERGED and manifest.startswith(DIVERGED):
        return manifest
    if status == CRASHED and since is not None and str(facts.get("ended") or "")[:_SECONDS] >= since[:_SECONDS]:
        return manifest  # torchrun exits with 1, whatever its processes exit with
    if status == LOST and manifest not in ("", "starting", RUNNING):
        return manifest
    return status


def _is_elman(command: Sequence[str]) -> bool:
    """Whether a command or a shell line calls `elman`."""
    words = " ".join(command).split()
    return any(word == "elman_core" or word.rpartition("/")[2] == "elman" for word in words)


def next_command(job: Job, attempt: int) -> tuple[str, ...]:
    """The command of attempt number `attempt`: `elman resume` if the job's run has a checkpoint, else the job's own.

    A run without a checkpoint starts again from the beginning; its old folder is moved to the logs if it has a manifest.
    """
    run = job.run
    if run is None:
        return job.command
    if any(run.glob("checkpoints/step-*")):
        command = job.command[: job.command.index("train")] if "train" in job.command else ELMAN
        return (*command, "resume", str(run))
    if (run / "manifest.json").exists():
        with storage_errors(f"cannot move {run} aside"):
            job.log.parent.mkdir(parents=True, exist_ok=True)
            run.rename(job.attempt_log(attempt - 1).with_suffix(".run"))
    return job.command


def figures(job: Job) -> str:
    """The figures of a finished training, as the end of a line; empty if there are none."""
    result = _manifest(job).get("result")
    known = {k: v for k, v in result.items() if isinstance(v, int | float)} if isinstance(result, dict) else {}
    words = {
        "bits_per_byte": "{:.4f} bits per byte",
        "loss_last_100_steps": "loss {:.4f} nats",
        "tok_s": "{:,.0f} tok/s",
    }
    return "".join(f", {text.format(known[key])}" for key, text in words.items() if key in known)


def last_line(log: str) -> str:
    """The last line of an attempt's log, without the name of the command before an error."""
    try:
        with open(open_regular(log), "rb") as opened:
            opened.seek(max(0, opened.seek(0, 2) - 4096))
            lines = [line.decode(errors="replace") for line in opened.read().splitlines()]
    except FileNotFoundError:
        return ""
    last = next((line.strip() for line in reversed(lines) if line.strip()), "").removeprefix("elman: ")
    return textwrap.shorten(printable(last), 500, placeholder=" …")


def last_word(attempt: Attempt) -> str:
    """The reason of an attempt that did not end well: its last line, unless it was killed and could not give a reason."""
    if attempt.exit_code == 128 + signal.SIGKILL and not attempt.cause:
        return "ended by SIGKILL: by a user, or by the system because memory ran out (if so, lower --slots)"
    return last_line(attempt.log)


def _manifest(job: Job) -> dict[str, Any]:
    if job.run is None:
        return {}
    try:
        return read_json(job.run / "manifest.json")
    except (FileNotFoundError, CheckpointError):
        return {}
