"""Which job runs when: one in each slot, each once, whatever happens to the scheduler in between.

Every change of a job is on the disk before it is acted on. A scheduler that starts on the same files finds what still runs
and waits for it, resumes what was cut short, and never repeats what is finished.
"""

from __future__ import annotations

import datetime
import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from elman_core.registry.errors import ConfigError
from elman_core.training.storage import storage_errors

from .job import (
    CRASHED,
    DIVERGED,
    INCOMPLETE,
    KILLED,
    LOST,
    OK,
    OOM,
    RUNNING,
    TIMEOUT,
    Attempt,
    Ending,
    Executor,
    Job,
    Slot,
    State,
    read_state,
    status_of,
    write_state,
)

RETRIES = 2
"""Times that one scheduler starts a job again after something outside the job ended it."""
GRACE = 120.0
"""Seconds that a job has to save after SIGTERM."""
LOOK = 2.0
"""Seconds between two looks at who else is on a job's GPU."""
_EMPTY = (".lock", "metrics.jsonl", "console.log")  # what a run has before its manifest
_OUTSIDE = (KILLED, INCOMPLETE, LOST)


class Observer(Protocol):
    """Who is told what happens."""

    def event(self, text: str) -> None:
        """Something happened, in one line."""

    def tick(self, states: Sequence[State]) -> None:
        """Called a few times a second with the state of every job, in order."""


@dataclass
class _Active:
    """An attempt under way."""

    job: Job
    slot: Slot
    handle: Any
    began: float  # of time.monotonic
    looked: float = 0.0
    reason: str = ""  # why it was told to stop
    deadline: float = float("inf")  # when it is killed, having been told to stop
    strangers: list[str] = field(default_factory=list)


class Scheduler:
    """Runs jobs on an executor.

    Args:
        jobs: in the order in which they are to start. executor. observer.
        again: run jobs that failed of themselves once more, too. retries, grace, every: seconds between two looks.

    Raises:
        CheckpointError: the state file of a job is damaged.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        executor: Executor,
        observer: Observer,
        again: bool = False,
        retries: int = RETRIES,
        grace: float = GRACE,
        every: float = 0.2,
    ) -> None:
        self.jobs, self.executor, self.observer = list(jobs), executor, observer
        self.retries, self.grace, self.every = retries, grace, every
        self.states = {job.id: read_state(job.state, job.id) for job in jobs}
        self.active: dict[str, _Active] = {}
        self.queue: list[Job] = []
        self.retried: dict[str, int] = {}
        self.stopping = ""
        self._waiting = ""
        self._again = again

    def run(self) -> list[State]:
        """Run all that is not finished; returns the state of every job, in order.

        Raises:
            ConfigError: a job can never have a slot. StorageError.
        """
        self._take_up()
        try:
            while self.active or (self.queue and not self.stopping):
                for active in list(self.active.values()):
                    self._watch(active)
                if not self.stopping:
                    self._start_what_fits()
                self.observer.tick(self.all_states)
                if self.active or self.queue:
                    time.sleep(self.every)
        except BaseException:
            if self.active:  # as if this process had been killed: they run on, and the next scheduler finds them
                self.observer.event(f"the scheduler failed; what runs is left running: {', '.join(self.active)}")
            raise
        finally:
            self.executor.close()
        self.observer.tick(self.all_states)
        return self.all_states

    @property
    def all_states(self) -> list[State]:
        return [self.states[job.id] for job in self.jobs]

    def interrupt(self) -> None:
        """From a signal handler: start nothing more and let what runs save. The second time, kill it."""
        if self.stopping:
            for active in self.active.values():
                active.deadline = 0.0
            return
        self.stopping = "interrupted"

    # taking up

    def _take_up(self) -> None:
        """Find what an earlier scheduler left running; queue what is not finished."""
        for job in self.jobs:
            cancel_file(job).unlink(missing_ok=True)
            state = self.states[job.id]
            if state.status == RUNNING and state.attempts:
                self._adopt(job, state)
            failed = not state.unfinished and not state.ok
            if (state.unfinished and job.id not in self.active) or (failed and self._again):
                self.queue.append(job)

    def _adopt(self, job: Job, state: State) -> None:
        attempt = state.attempts[-1]
        found = self.executor.adopt(job, attempt, len(state.attempts))
        if found is None:
            self._close(job, state, attempt, Ending(None))
            return
        handle, slot = found
        self.active[job.id] = _Active(job, slot, handle, time.monotonic() - _age(attempt.started))
        self._write(job)
        self.observer.event(f"{job.id}: still runs on {slot.name}, started by an earlier scheduler")

    # starting

    def _start_what_fits(self) -> None:
        while self.queue:
            job = self.queue[0]
            if cancel_file(job).exists():
                self._cancel_waiting(self.queue.pop(0))
                continue
            try:
                slot = self.executor.slot(job)
            except ConfigError:
                if self.active:  # they are not to blame: the error is raised when they have ended
                    return
                raise
            if slot is None:
                self._say_waiting()
                return
            self._waiting = ""
            self._start(self.queue.pop(0), slot)

    def _start(self, job: Job, slot: Slot) -> None:
        state = self.states[job.id]
        attempt = Attempt(host=slot.host, slot=slot.name, gpu_uuid=",".join(slot.gpus) or None, started=now())
        state.attempts.append(attempt)
        state.status = RUNNING
        self._write(job)  # before it starts: if this process dies now, the next one looks for it
        command = next_command(job, len(state.attempts))
        handle = self.executor.start(job, slot, command, attempt, len(state.attempts))
        self.active[job.id] = _Active(job, slot, handle, time.monotonic())
        self._write(job)
        how = "resumed" if command != job.command else "started" if len(state.attempts) == 1 else "started again"
        self.observer.event(f"{job.id}: {how} on {slot.name}")

    def _say_waiting(self) -> None:
        why = getattr(self.executor, "why", "")
        if why != self._waiting and not self.active:
            self.observer.event(f"waiting for a place: {why}" if why else "waiting for a place")
        self._waiting = why

    def _cancel_waiting(self, job: Job) -> None:
        cancel_file(job).unlink(missing_ok=True)
        self.states[job.id].status = KILLED
        self._write(job)
        self.observer.event(f"{job.id}: cancelled before it started")

    # watching

    def _watch(self, active: _Active) -> None:
        ending = self.executor.poll(active.handle)
        if ending is not None:
            self._end(active, ending)
            return
        job, clock = active.job, time.monotonic()
        if self.stopping and not active.reason:
            self._stop(active, self.stopping, clock)
        elif not active.reason and cancel_file(job).exists():
            self._stop(active, "cancelled", clock)
        elif not active.reason and job.timeout is not None and clock - active.began > job.timeout:
            self._stop(active, TIMEOUT, clock)
        if clock > active.deadline:
            self.executor.stop(active.handle, now=True)
            active.deadline = clock + 1.0  # once more, should something of it still live
        if clock - active.looked > LOOK:
            active.looked = clock
            self._look_around(active)

    def _stop(self, active: _Active, reason: str, clock: float) -> None:
        active.reason, active.deadline = reason, min(active.deadline, clock + self.grace)
        self.executor.stop(active.handle)
        self.observer.event(f"{active.job.id}: {reason}, told to save and stop")

    def _look_around(self, active: _Active) -> None:
        strangers = self.executor.contended(active.handle)
        new = [who for who in strangers if who not in active.strangers]
        if new:
            active.strangers += new
            state = self.states[active.job.id]
            state.contended = True
            state.attempts[-1].strangers = list(active.strangers)
            self._write(active.job)
            self.observer.event(f"{active.job.id}: CONTENDED, {active.slot.name} is shared with {', '.join(new)}")

    # ending

    def _end(self, active: _Active, ending: Ending) -> None:
        job, state = active.job, self.states[active.job.id]
        del self.active[job.id]
        self.executor.release(active.slot)
        attempt = state.attempts[-1]
        if ending.log is not None:
            attempt.log = ending.log
        self._close(job, state, attempt, ending, active.reason)
        cancel_file(job).unlink(missing_ok=True)
        outside = state.status in _OUTSIDE or (bool(ending.cause) and state.status != OK)
        again = outside and not active.reason and self.retried.get(job.id, 0) < self.retries and not self.stopping
        if again:
            self.retried[job.id] = self.retried.get(job.id, 0) + 1
            self.queue.append(job)
        why = f" ({attempt.cause})" if attempt.cause else ""
        seconds = f"{time.monotonic() - active.began:.0f} s"
        tail = figures(job)
        if state.status != OK:
            tail = f": {said}" if (said := last_line(attempt.log)) else ""
            tail += "; will be tried again" if again else f"; see {attempt.log}"
        self.observer.event(f"{job.id}: {state.status}{why} after {seconds}{tail}")

    def _close(self, job: Job, state: State, attempt: Attempt, ending: Ending, reason: str = "") -> None:
        attempt.ended, attempt.exit_code = now(), ending.exit_code
        attempt.cause = ending.cause or reason
        state.status = final_status(job, ending, reason)
        if ending.cause and state.status in (CRASHED, LOST):
            state.status = LOST  # the hardware failed, whatever the program made of it
        self._write(job)

    def _write(self, job: Job) -> None:
        write_state(job.state, self.states[job.id])


def final_status(job: Job, ending: Ending, reason: str = "") -> str:
    """The status of a job whose attempt ended: its exit code, and of a training what its manifest says more exactly.

    Args:
        reason: why the scheduler stopped it, if it did.
    """
    if ending.status is not None:
        return ending.status
    status, manifest = status_of(ending.exit_code), _manifest_status(job)
    if manifest == OK and status in (OK, *_OUTSIDE):
        return OK  # complete and saved, whatever came after
    if reason == TIMEOUT:
        return TIMEOUT
    if job.run is None:
        own = status in (DIVERGED, OOM, TIMEOUT) and not _is_elman(job.command)
        return CRASHED if own else status  # to another program, 3 or 4 means something else
    if status == OK:
        return manifest or CRASHED
    if status == DIVERGED and manifest.startswith(DIVERGED):
        return manifest
    if status == LOST and manifest not in ("", "starting", RUNNING):
        return manifest
    return status


def _is_elman(command: Sequence[str]) -> bool:
    """Whether a command line, or a line of shell, calls this package's command."""
    words = " ".join(command).split()
    return any(word == "elman_core" or word.rpartition("/")[2] == "elman" for word in words)


def next_command(job: Job, attempt: int) -> tuple[str, ...]:
    """What starts or continues a job: `elman resume` once its run has a checkpoint.

    A run without one holds no step, and the next attempt begins anew: what was there goes to the logs, if there was anything.

    Args:
        attempt: the number of the attempt that is to start.
    """
    run = job.run
    if run is None:
        return job.command
    if any(run.glob("checkpoints/step-*")):
        return (sys.executable, "-m", "elman_core", "resume", str(run))
    if (run / "manifest.json").exists():
        with storage_errors(f"cannot move {run} aside"):
            job.log.parent.mkdir(parents=True, exist_ok=True)
            run.rename(job.attempt_log(attempt - 1).with_suffix(".run"))
    elif run.is_dir() and all(p.name in _EMPTY or p.name.startswith(".partial-") for p in run.iterdir()):
        shutil.rmtree(run)
    return job.command


def cancel_file(job: Job) -> Path:
    """The file that asks the scheduler to cancel a job."""
    return job.state.with_suffix(".cancel")


def figures(job: Job) -> str:
    """The figures of a finished training, to end a line with; empty if there are none."""
    result = _manifest(job).get("result") or {}
    words = {"bits_per_byte": "{:.4f} bits per byte", "loss_last_100_steps": "loss {:.4f}", "tok_s": "{:,.0f} tok/s"}
    return "".join(f", {text.format(result[key])}" for key, text in words.items() if key in result)


def last_line(log: str) -> str:
    """The last thing that an attempt said, without the name of the command before an error."""
    try:
        with open(log, "rb") as opened:
            opened.seek(max(0, opened.seek(0, 2) - 4096))
            lines = opened.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "").removeprefix("elman: ")


def _manifest_status(job: Job) -> str:
    """What a run says of itself; empty if it says nothing."""
    return str(_manifest(job).get("status", ""))


def _manifest(job: Job) -> dict[str, Any]:
    if job.run is None:
        return {}
    try:
        return json.loads((job.run / "manifest.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}


def now() -> str:
    """The time in UTC, ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def _age(started: str | None) -> float:
    """Seconds since a time in ISO 8601."""
    if started is None:
        return 0.0
    then = datetime.datetime.fromisoformat(started)
    return max(0.0, (datetime.datetime.now(datetime.UTC) - then).total_seconds())
