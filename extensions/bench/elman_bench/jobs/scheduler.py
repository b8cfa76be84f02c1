"""The scheduler: one job in each slot, each job once, even if the scheduler is killed in between.

Every change of a job is on the disk before it takes effect. A new scheduler on the same files waits for jobs that still run,
resumes interrupted jobs, and never repeats finished ones.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from elman_core.extension import ConfigError, ElmanError, StorageError, now

from .job import (
    CRASHED,
    KILLED,
    LOST,
    OK,
    OUTSIDE,
    RUNNING,
    TIMEOUT,
    Attempt,
    Ending,
    Executor,
    Job,
    Slot,
    State,
    read_state,
    write_state,
)
from .outcome import figures, final_status, last_word, next_command

RETRIES = 2
"""Number of times that a scheduler restarts a job that something outside the job ended."""
GRACE = 120.0
"""Seconds that a job has to save after SIGTERM."""
LOOK = 2.0
"""Seconds between two checks for foreign processes on a job's GPUs."""
ASK, SAY = 1.0, 60.0
"""Seconds between two requests for a slot while none is free, and between two lines that say so."""


class Observer(Protocol):
    """Receives what happens."""

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


class Scheduler:
    """Runs jobs on an executor.

    Args:
        jobs: in the order in which they start. again: run failed jobs once more.
        seconds: after which running jobs save and stop and no other starts; None: never.
        retries: restarts after causes outside the job. grace: seconds to save after SIGTERM. every: seconds between two polls.

    Raises:
        CheckpointError: the state file of a job is damaged.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        executor: Executor,
        observer: Observer,
        again: bool = False,
        seconds: float | None = None,
        retries: int = RETRIES,
        grace: float = GRACE,
        every: float = 0.2,
    ) -> None:
        self.jobs, self.executor, self.observer = list(jobs), executor, observer
        self.until = float("inf") if seconds is None else time.monotonic() + seconds
        self.retries, self.grace, self.every = retries, grace, every
        self.states = {job.id: read_state(job.state, job.id) for job in jobs}
        self.active: dict[str, _Active] = {}
        self.queue: list[Job] = []
        self.retried: dict[str, int] = {}
        self.stopping = ""
        self._told = False
        self._wrote = False  # a state, after which the folder is there
        self._again = again
        self._ask_again = 0.0  # when to ask for a place next
        self._said = -SAY  # when it was said what jobs wait for

    def run(self) -> list[State]:
        """Run all unfinished jobs; returns the state of every job, in order.

        Raises:
            ConfigError: there can never be a slot for a job. StorageError.
        """
        try:
            self._take_up()
            while self.active or (self.queue and not self.stopping):
                if time.monotonic() > self.until and not self.stopping:
                    self.stopping = "out of time"
                self._say_stopping()
                for active in list(self.active.values()):
                    self._watch(active)
                if not self.stopping and time.monotonic() >= self._ask_again:
                    self._start_what_fits()
                self.observer.tick(self.all_states)
                if self.active or self.queue:
                    time.sleep(self.every)
        except BaseException:
            if self.active:  # as if this process had been killed: the next scheduler finds them
                self.observer.event(f"the scheduler failed; these jobs still run: {', '.join(self.active)}")
            raise
        finally:
            self.executor.close()
        self.observer.tick(self.all_states)
        return self.all_states

    @property
    def all_states(self) -> list[State]:
        return [self.states[job.id] for job in self.jobs]

    def interrupt(self) -> None:
        """Start no more jobs and let the running ones save; the second call kills them. Prints nothing, for signal handlers."""
        if self.stopping:
            for active in self.active.values():
                active.deadline = 0.0
            return
        self.stopping = "interrupted"

    def _say_stopping(self) -> None:
        if not self.stopping or self._told:
            return
        self._told = True
        late = time.monotonic() > self.until
        why, kills = ("out of time", "Ctrl-C") if late else ("stopping", "a second Ctrl-C")
        self.observer.event(f"{why}: running jobs save first; {kills} kills them")

    def _take_up(self) -> None:
        """Find jobs that an earlier scheduler left running; queue unfinished jobs."""
        for job in self.jobs:
            cancel_file(job).unlink(missing_ok=True)
            state = self.states[job.id]
            if state.status == RUNNING:
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

    def _start_what_fits(self) -> None:
        while (job := self._next()) is not None:
            if cancel_file(job).exists():
                self.queue.remove(job)
                self._cancel_waiting(job)
                continue
            try:
                slot = self.executor.slot(job)
            except ConfigError:
                if self.active:  # the error is raised again when they have ended
                    return
                raise
            if slot is None:
                self._say_waiting()
                return
            self.queue.remove(job)
            self._start(job, slot)

    def _next(self) -> Job | None:
        """The first job that need not wait. Jobs that wait for one that will not run are dropped from the queue."""
        under_way = {job.id for job in self.queue} | set(self.active)
        for job in list(self.queue):
            waits = [id for id in job.after if id in under_way]
            if not waits and all(not self.states[id].unfinished for id in job.after):
                return job
            if not waits:
                self.queue.remove(job)
                self.observer.event(
                    f"{job.id}: not started: it waits for {', '.join(job.after)}, which did not all end"
                )
        return None

    def _start(self, job: Job, slot: Slot) -> None:
        """Start a job. If its recipe, run or log cannot be used, that job has failed, and the others go on."""
        state = self.states[job.id]
        attempt = Attempt(
            host=slot.host, slot=slot.name, gpu_uuid=",".join(slot.gpus) or None, started=now("milliseconds")
        )
        state.attempts.append(attempt)
        state.status = RUNNING
        self._write(job)  # before it starts: if this process dies now, the next scheduler looks for it
        try:
            if job.prepare is not None:
                job.prepare()
            command = next_command(job, len(state.attempts))
            handle = self.executor.start(job, slot, command, attempt, len(state.attempts))
        except ElmanError as error:
            self.executor.release(slot)
            state.status = CRASHED
            attempt.ended = now("milliseconds")
            attempt.cause = str(error)
            self._write(job)
            self.observer.event(f"{job.id}: {CRASHED}: {error}")
            return
        self.active[job.id] = _Active(job, slot, handle, time.monotonic())
        self._write(job)
        how = "started" if len(state.attempts) == 1 else "started again"
        if command != job.command:
            how = "resumed"
        self.observer.event(f"{job.id}: {how} on {slot.name}")

    def _say_waiting(self) -> None:
        """Say once a minute what the jobs wait for, if none runs."""
        clock = time.monotonic()
        self._ask_again = clock + ASK
        if not self.active and clock - self._said > SAY:
            self._said = clock
            why = getattr(self.executor, "why", "")
            self.observer.event(f"waiting for a slot: {why}" if why else "waiting for a slot")

    def _cancel_waiting(self, job: Job) -> None:
        cancel_file(job).unlink(missing_ok=True)
        self.states[job.id].status = KILLED
        self._write(job)
        self.observer.event(f"{job.id}: cancelled before it started")

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
            active.deadline = clock + 1.0  # again, if a part of it still lives
        if clock - active.looked > LOOK:
            active.looked = clock
            self._look_around(active)

    def _stop(self, active: _Active, reason: str, clock: float) -> None:
        active.reason = reason
        active.deadline = min(active.deadline, clock + self.grace)
        self.executor.stop(active.handle)
        self.observer.event(f"{active.job.id}: {reason}, told to save and stop")

    def _look_around(self, active: _Active) -> None:
        strangers = self.executor.contended(active.handle)
        state = self.states[active.job.id]
        new = [who for who in strangers if who not in state.attempts[-1].strangers]
        if new:
            state.contended = True
            state.attempts[-1].strangers += new
            self._write(active.job)
            self.observer.event(f"{active.job.id}: CONTENDED, {active.slot.name} is shared with {', '.join(new)}")

    def _end(self, active: _Active, ending: Ending) -> None:
        job, state = active.job, self.states[active.job.id]
        del self.active[job.id]
        self._ask_again = 0.0
        self.executor.release(active.slot)
        attempt = state.attempts[-1]
        self._close(job, state, attempt, ending, active.reason)
        cancel_file(job).unlink(missing_ok=True)
        outside = state.status in OUTSIDE or (bool(ending.cause) and state.status != OK)
        again = outside and not active.reason and self.retried.get(job.id, 0) < self.retries and not self.stopping
        if again:
            self.retried[job.id] = self.retried.get(job.id, 0) + 1
            self.queue.append(job)
        why = f" ({attempt.cause})" if attempt.cause else ""
        seconds = f"{time.monotonic() - active.began:.0f} s"
        if state.status == OK:
            tail = figures(job)
        else:
            said = last_word(attempt)
            tail = f": {said}" if said else ""
            tail += "; will be tried again" if again else f"; see {attempt.log}"
        self.observer.event(f"{job.id}: {state.status}{why} after {seconds}{tail}")

    def _close(self, job: Job, state: State, attempt: Attempt, ending: Ending, reason: str = "") -> None:
        attempt.ended, attempt.exit_code = now("milliseconds"), ending.exit_code
        attempt.cause = ending.cause or reason
        state.status = final_status(job, ending, reason, attempt.started)
        if ending.cause and state.status in (CRASHED, LOST):
            state.status = LOST  # the hardware failed, however the program ended
        self._write(job)

    def _write(self, job: Job) -> None:
        folder = job.state.parent.parent
        if self._wrote and not folder.is_dir():
            hint = "run the same command with --out and its new place"
            raise StorageError(f"{folder} was moved or removed while its jobs ran: {hint}")
        self._wrote = True
        write_state(job.state, self.states[job.id])


def cancel_file(job: Job) -> Path:
    """The file that asks the scheduler to cancel a job."""
    return job.state.with_suffix(".cancel")


def _age(started: str | None) -> float:
    """Seconds since a time in ISO 8601."""
    try:
        then = datetime.datetime.fromisoformat(started or "")
        return max(0.0, (datetime.datetime.now(datetime.UTC) - then).total_seconds())
    except (ValueError, TypeError):  # none, or one without a time zone
        return 0.0
