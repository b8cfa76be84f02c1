"""A job, the file with its state, and the interface of what runs it. Needs no torch.

The scheduler decides when a job runs; an `Executor` decides how: as a process of this machine, or on a Ray cluster. The state
of each job is one small JSON file that is replaced in one step, so that a scheduler that is killed loses nothing.
"""

from __future__ import annotations

import dataclasses
import re
import signal
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from elman_core.extension import CheckpointError, ConfigError, ElmanError, check_value, read_json, write_json

PYTHON = (sys.executable, "-P")
"""This interpreter, which runs no code of the current folder."""
WAITING, RUNNING, OK = "waiting", "running", "ok"
DIVERGED, OOM, CRASHED, TIMEOUT = "diverged", "oom", "crashed", "timeout"
KILLED, INCOMPLETE, LOST = "killed", "incomplete", "lost"

UNFINISHED = (WAITING, RUNNING, KILLED, INCOMPLETE, LOST)
"""A suite that is started again runs jobs in these states. Jobs in the other states are finished, well or not."""

OUTSIDE = (KILLED, INCOMPLETE, LOST)
"""States with a cause outside the job. The scheduler tries such a job again, unless it was the cause itself."""

ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,=+-]*")


@dataclass(frozen=True)
class Job:
    """A command to run in one slot.

    Attributes:
        id: letters, digits and `_.,=+-`, unique in its folder; the job's files have this name.
        command: the argument vector.
        run: the run folder that the command makes; a later attempt resumes it once it has a checkpoint, and its manifest gives
            the job's status. None for a command that is not a training: its exit code gives the status.
        log: attempt n writes its output to `<stem>.<n><suffix>`, from 1 (see `attempt_log`). state: the state file.
        timeout: seconds of one attempt, or None. gpus: number of GPUs. env: added to the environment.
        after: jobs of the same list that must be finished, well or not, before this one starts.
        prepare: called before an attempt starts. If it raises `ConfigError`, the job has failed.
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
        if not ID.fullmatch(self.id):
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
        name: shown to users, unique on its host: "gpu 3", "cpu 0". host: the machine.
        gpus: UUIDs of its GPUs. env: variables that make a process see these GPUs only.
    """

    name: str
    host: str = ""
    gpus: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ending:
    """How an attempt ended.

    Attributes:
        exit_code: as a shell gives it, 128 + n for signal n; None if unknown.
        cause: the reason if it lies outside the job, such as "timeout", "cancelled", "interrupted", "lost node"; else empty.
        status: the status, if the executor knows it better than the run's manifest.
    """

    exit_code: int | None
    cause: str = ""
    status: str | None = None


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
    """Foreign processes seen on its GPUs: "pid 4711 (python)"."""


@dataclass
class State:
    """The content of a job's state file."""

    id: str
    status: str = WAITING
    contended: bool = False
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def unfinished(self) -> bool:
        """Whether the job has to run again."""
        return self.status in UNFINISHED

    @property
    def ok(self) -> bool:
        return self.status == OK


class Executor(Protocol):
    """Runs jobs. All methods return at once and are called from one thread.

    Handles belong to the executor; the scheduler only passes them on. The executor fills in `attempt` (host, slot, gpu_uuid,
    pid, log), and the scheduler writes it to the state file.
    """

    def slot(self, job: Job) -> Slot | None:
        """A free slot for `job`, held until `release`; None if there is none now.

        Raises:
            ConfigError: there are not enough GPUs for it.
        """

    def start(self, job: Job, slot: Slot, command: tuple[str, ...], attempt: Attempt, number: int) -> Any:
        """Start attempt `number` (from 1) of `job` with `command`, the job's own or `elman resume`. Returns a handle."""

    def adopt(self, job: Job, attempt: Attempt, number: int) -> tuple[Any, Slot] | None:
        """Handle and slot of an attempt that an earlier scheduler started, if it still runs or left an exit code; or None."""

    def poll(self, handle: Any) -> Ending | None:
        """How the attempt ended, or None while it runs."""

    def contended(self, handle: Any) -> list[str]:
        """Foreign processes on the GPUs of the attempt now, in words."""

    def stop(self, handle: Any, now: bool = False) -> None:
        """Tell the attempt to save and end (SIGTERM), or kill it (`now`: SIGKILL). `poll` reports the end."""

    def release(self, slot: Slot) -> None:
        """Give a slot back."""

    def close(self) -> None:
        """Release everything. Running jobs are left alone."""


def read_state(path: Path, id: str) -> State:
    """The state of job `id`; a new one if there is no file yet.

    Raises:
        CheckpointError: the file is there and is not a state of this job.
    """
    try:
        tree = read_json(path)
        attempts = [Attempt(**_known(Attempt, a)) for a in tree.pop("attempts")]
        state = State(**_known(State, tree), attempts=attempts)
        if state.status == RUNNING and not attempts:
            raise ConfigError("it is running and was never started")
    except FileNotFoundError:
        return State(id)
    except (OSError, ElmanError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not the state of a job: {error}; remove it to run the job again") from error
    if state.id != id:
        raise CheckpointError(f"{path} is the state of job {state.id}, not of {id}")
    return state


def write_state(path: Path, state: State) -> None:
    """Replace the state file in one step. Raises `StorageError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, dataclasses.asdict(state))


def status_of(exit_code: int | None) -> str:
    """The status that an exit code of `elman` (or of any command) means; 128 + n and -n are deaths by signal n.

    Signals sent by others mean "killed" (SIGINT: "incomplete"). Faults of the program, such as SIGSEGV, and all codes without
    another meaning are "crashed". None is "lost".
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
    """The fields of a dataclass among `values`, each of its type; fields of later versions are ignored."""
    hints = typing.get_type_hints(kind)
    return {k: check_value(k, v, hints[k]) for k, v in values.items() if k in hints}
