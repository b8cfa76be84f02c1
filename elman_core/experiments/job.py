"""One job of a comparison, what is written about it, and what runs it.

The scheduler decides which job runs when; an `Executor` knows how: as a process of this machine, or as a task of a cluster.
What a job has come to is in one small JSON file, replaced in one step, so that a scheduler that is killed loses nothing.
Nothing here needs torch.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from elman_core.registry.errors import CheckpointError, ConfigError
from elman_core.storage import write_json

WAITING, RUNNING, OK = "waiting", "running", "ok"
DIVERGED, OOM, CRASHED, TIMEOUT = "diverged", "oom", "crashed", "timeout"
KILLED, INCOMPLETE, LOST = "killed", "incomplete", "lost"

UNFINISHED = (WAITING, RUNNING, KILLED, INCOMPLETE, LOST)
"""A suite that is started again goes on with these. The others have an answer, if not the one that was hoped for."""

OUTSIDE = (KILLED, INCOMPLETE, LOST)
"""What something else did to a job. A scheduler that did not do it tries again."""

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,=+-]*")


@dataclass(frozen=True)
class Job:
    """What one slot is given to do.

    Attributes:
        id: letters, digits and `_.,=+-`, unique in its folder; the files of the job are named after it.
        command: the argument vector that starts it.
        run: the run folder that the command makes; the job goes on with `elman resume` once a manifest is in it, and its
            status is the manifest's. None for a command that is not a training: its exit code decides.
        log: where its output goes; attempt n writes `<stem>.<n><suffix>`, counted from 1 (see `attempt_log`).
        state: its state file.
        timeout: seconds of one attempt, or None. gpus: how many it takes. env: added to the environment.
        after: jobs of the same list that must have an answer, good or bad, before this one starts.
        prepare: called before an attempt starts. A `ConfigError` of it is the job's end: it can never start.
    """

    id: str
    command: tuple[str, ...]
    run: Path | None
    log: Path
    state: Path
    timeout: float | None = None
    gpus: int = 1
    env: Mapping[str, str] = field(default_factory=dict)
    after: tuple[str, ...] = ()
    prepare: Callable[[], None] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not _ID.fullmatch(self.id):
            raise ConfigError(f"the name of a job is letters, digits and _.,=+-, not {self.id!r}")
        if not self.command:
            raise ConfigError(f"job {self.id} has no command")

    def attempt_log(self, attempt: int) -> Path:
        """The log of attempt `attempt`, from 1: `logs/<id>.1.log`."""
        return self.log.with_name(f"{self.log.stem}.{attempt}{self.log.suffix}")


@dataclass(frozen=True)
class Slot:
    """A place for one job.

    Attributes:
        name: for people, unique on its host: "gpu 3", "cpu 0". host: the machine, empty if it is not known yet.
        gpus: UUIDs of the GPUs it holds. env: what makes a process see them and nothing else.
    """

    name: str
    host: str = ""
    gpus: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ending:
    """How an attempt ended.

    Attributes:
        exit_code: as a shell gives it, 128 + n for signal n; None if nobody saw it.
        cause: why, if the job was not the cause: "timeout", "cancelled", "interrupted", "lost node", "gpu lost". Else empty.
        status: one that the executor knows better than the run's manifest, or None.
        log: a file with what the job said, if it is not where the job's own log is.
    """

    exit_code: int | None
    cause: str = ""
    status: str | None = None
    log: str | None = None


@dataclass
class Attempt:
    """One start of a job. Times are ISO 8601 in UTC; `pid_started` tells this process from a later one with its number."""

    host: str = ""
    slot: str = ""
    gpu_uuid: str | None = None
    pid: int | None = None
    pid_started: float | None = None
    started: str | None = None
    ended: str | None = None
    exit_code: int | None = None
    cause: str = ""
    log: str = ""
    strangers: list[str] = field(default_factory=list)
    """Who else was seen on its GPUs: "pid 4711 (python)"."""


@dataclass
class State:
    """What is known of a job: the content of its state file."""

    id: str
    status: str = WAITING
    contended: bool = False
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def unfinished(self) -> bool:
        """Whether there is something left to do."""
        return self.status in UNFINISHED

    @property
    def ok(self) -> bool:
        return self.status == OK


class Executor(Protocol):
    """Runs jobs somewhere. All methods return at once; they are called from one thread.

    A job's handle is the executor's own and means nothing to the scheduler. An executor fills in `attempt` what it learns
    (host, slot, gpu_uuid, pid, log); the scheduler writes it down.
    """

    def slot(self, job: Job) -> Slot | None:
        """A free place for `job`, taken for it until `release`; None if there is none now.

        Raises:
            ConfigError: there can never be one, for want of GPUs.
        """

    def start(self, job: Job, slot: Slot, command: tuple[str, ...], attempt: Attempt, number: int) -> Any:
        """Start attempt `number` (from 1) of `job` with `command`, which is the job's own or resumes its run.

        Returns:
            A handle for `poll` and `stop`.
        """

    def adopt(self, job: Job, attempt: Attempt, number: int) -> tuple[Any, Slot] | None:
        """The handle of an attempt that an earlier scheduler began and that still runs or whose end is known, or None."""

    def poll(self, handle: Any) -> Ending | None:
        """How the attempt ended, or None while it runs."""

    def contended(self, handle: Any) -> list[str]:
        """The strangers on the GPUs of the attempt now, in words; empty if it has them to itself."""

    def stop(self, handle: Any, now: bool = False) -> None:
        """Ask the attempt to save and end (SIGTERM); with `now`, end it (SIGKILL). `poll` then says so."""

    def release(self, slot: Slot) -> None:
        """Give a place back."""

    def close(self) -> None:
        """Let go of everything. What still runs is left alone."""


def read_state(path: Path, id: str) -> State:
    """The state of job `id`; a new one if there is no file yet.

    Raises:
        CheckpointError: the file is there and is not a state of this job.
    """
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        attempts = [Attempt(**_known(Attempt, a)) for a in tree["attempts"]]
        state = State(**{**_known(State, tree), "attempts": attempts})
    except FileNotFoundError:
        return State(id)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not the state of a job: {error}; remove it to run the job again") from error
    if state.id != id:
        raise CheckpointError(f"{path} is the state of job {state.id}, not of {id}")
    return state


def write_state(path: Path, state: State) -> None:
    """Replace the state file in one step. Raises `StorageError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, dataclasses.asdict(state))


def status_of(exit_code: int | None) -> str:
    """The status that an exit code of `elman` (or of any command) means. 128 + n, and -n, is a death by signal n.

    Signals that others send are "killed" (SIGINT: "incomplete"); those that a program earns itself, such as a bad address,
    are "crashed", as is every code without a meaning of its own. None, which nobody saw, is "lost".
    """
    if exit_code is None:
        return LOST
    signum = -exit_code if exit_code < 0 else exit_code - 128
    if signum in (signal.SIGHUP, signal.SIGTERM, signal.SIGKILL):
        return KILLED
    if signum == signal.SIGINT:
        return INCOMPLETE
    return {0: OK, 3: OOM, 4: DIVERGED, 6: TIMEOUT}.get(exit_code, CRASHED)


def _known(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a dataclass among `values`: what a later version added is passed over."""
    names = {f.name for f in dataclasses.fields(kind)}
    return {k: v for k, v in values.items() if k in names}


def now(timespec: str = "milliseconds") -> str:
    """The time in UTC, ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec=timespec)
