"""Runs jobs as processes of this machine. They outlive the scheduler; the next scheduler finds them by their locks."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

from elman_core.extension import (
    CheckpointError,
    ConfigError,
    StorageError,
    appending,
    read_bytes,
    read_json,
    storage_errors,
    write_json,
)

from .gpus import GpuLostError, Nvml
from .job import PYTHON, Attempt, Ending, Job, Slot
from .locks import Lock, holder, is_locked, lock_soon
from .slots import CpuSlots, GpuSlots

CHILD = (*PYTHON, "-m", "elman_bench.jobs.child")


@dataclass
class Running:
    """A running attempt, started by this scheduler (with `process`) or by an earlier one."""

    job: Job
    attempt: Attempt
    slot: Slot
    lock: Path
    exit_file: Path
    process: subprocess.Popen[bytes] | None = None
    killed: bool = False


class LocalExecutor:
    """`Executor` for this machine.

    Args:
        slots: the slots. monitor: the driver of their GPUs, or None without GPUs.
        child: the command of the process around a job, to which its own arguments are added.
    """

    def __init__(self, slots: GpuSlots | CpuSlots, monitor: Nvml | None = None, child: tuple[str, ...] = CHILD) -> None:
        self.slots, self.monitor, self.child = slots, monitor, child

    @property
    def why(self) -> str:
        """Why slots could not be taken."""
        return "; ".join(self.slots.why.values())

    def slot(self, job: Job) -> Slot | None:
        return self.slots.take(job.gpus, f"{job.id} of {job.state.parent.parent.absolute()}")

    def start(self, job: Job, slot: Slot, command: tuple[str, ...], attempt: Attempt, number: int) -> Running:
        running = self._running(job, attempt, slot, number)
        log = job.attempt_log(number)
        with storage_errors(f"cannot write {log}"):
            log.parent.mkdir(parents=True, exist_ok=True)
            job.state.parent.mkdir(parents=True, exist_ok=True)
        with appending(log) as output, contextlib.closing(_locked(running)) as lock:  # then the child has both
            with storage_errors(f"cannot remove {running.exit_file}"):
                running.exit_file.unlink(missing_ok=True)  # of an attempt whose state file was removed
            fds = [lock.fd, *(other.fd for other in self.slots.locks(slot))]
            try:
                running.process = subprocess.Popen(
                    [*self.child, str(running.exit_file), ",".join(map(str, fds)), *command],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "PYTHONUNBUFFERED": "1", **slot.env, **job.env},
                    pass_fds=fds,
                    start_new_session=True,
                )
            except (OSError, ValueError) as error:  # too long, with a NUL, no more processes: as when it is not there
                output.write(f"cannot start the command: {getattr(error, 'strerror', None) or error}\n")
                write_json(running.exit_file, {"exit_code": 126})
            else:
                with contextlib.suppress(StorageError):  # the job runs, and the state file says the same
                    lock.write(f"{running.process.pid}\n")
                attempt.pid, attempt.pid_started = running.process.pid, started_at(running.process.pid)
        attempt.host, attempt.slot = platform.node(), slot.name
        attempt.gpu_uuid = ",".join(slot.gpus) or None
        attempt.log = str(log)
        return running

    def adopt(self, job: Job, attempt: Attempt, number: int) -> tuple[Running, Slot] | None:
        gpus = tuple(attempt.gpu_uuid.split(",")) if attempt.gpu_uuid else ()
        slot = Slot(attempt.slot, attempt.host, gpus)
        running = self._running(job, attempt, slot, number)
        if not is_locked(running.lock) and not running.exit_file.exists():
            return None
        if attempt.pid is None:  # the scheduler was killed between the start and the writing of the state
            with contextlib.suppress(OSError, ValueError):
                attempt.pid = int(read_bytes(running.lock))
                attempt.pid_started = started_at(attempt.pid)
            attempt.log = str(job.attempt_log(number))
        if isinstance(self.slots, CpuSlots):
            self.slots.occupy(slot.name)
        return running, slot

    def poll(self, handle: Running) -> Ending | None:
        if handle.process is not None:
            handle.process.poll()  # reaps it
        code = _exit_code(handle.exit_file)
        if code is None:
            if is_locked(handle.lock):
                return None
            code = _exit_code(handle.exit_file)  # written before the lock was released
            if code is None and handle.process is not None:
                code = handle.process.wait()
                code = 128 - code if code < 0 else code
            elif code is None and handle.killed:
                code = 128 + signal.SIGKILL
        handle.lock.unlink(missing_ok=True)
        return Ending(code, cause=self._fault(handle) if code != 0 else "")

    def contended(self, handle: Running) -> list[str]:
        if self.monitor is None or handle.attempt.pid is None:
            return []
        if isinstance(self.slots, GpuSlots) and self.slots.share > 1:
            return [f"up to {self.slots.share - 1} jobs of this scheduler"]
        found: list[str] = []
        for uuid in handle.slot.gpus:
            try:
                look = self.monitor.look(uuid)
                own = {pid for pid in look.pids if _belongs(pid, handle.attempt.pid)} | {handle.attempt.pid}
                if look.pids - own:  # some may be processes of the job that have just ended
                    own |= look.pids - self.monitor.look(uuid).pids
            except GpuLostError:  # the job fails soon, and `poll` says why
                continue
            found += self.monitor.strangers(look, own)
        return found

    def stop(self, handle: Running, now: bool = False) -> None:
        handle.killed = handle.killed or now
        if handle.process is not None and handle.process.poll() is not None and not is_locked(handle.lock):
            return
        if handle.attempt.host == platform.node():  # an attempt on another machine can only be waited for
            signum = signal.SIGKILL if now else signal.SIGTERM
            kill_group(handle.attempt.pid, handle.attempt.pid_started, signum, handle.exit_file)

    def release(self, slot: Slot) -> None:
        self.slots.give(slot)

    def close(self) -> None:
        self.slots.close()

    def _running(self, job: Job, attempt: Attempt, slot: Slot, number: int) -> Running:
        log = job.attempt_log(number)
        return Running(job, attempt, slot, attempt_lock(job, number), log.with_suffix(".exit"))

    def _fault(self, handle: Running) -> str:
        """ "gpu lost: …" if the driver no longer answers for a GPU of the attempt; that GPU is not used again."""
        if self.monitor is None or not isinstance(self.slots, GpuSlots):
            return ""
        for uuid in handle.slot.gpus:
            try:
                self.monitor.look(uuid)
            except GpuLostError as error:
                self.slots.retire(uuid)
                return f"gpu lost: {error}"
        return ""


def _locked(running: Running) -> Lock:
    """The lock of an attempt. Raises `ConfigError` if the attempt runs: its state file was removed meanwhile."""
    try:
        return lock_soon(running.lock)
    except BlockingIOError as error:
        raise ConfigError(
            f"job {running.job.id} still runs, started by an earlier scheduler (pid {holder(running.lock)}): end that "
            "process, then run the same command with --again"
        ) from error


def _belongs(pid: int, leader: int) -> bool:
    """Whether a process is in the session that `leader` leads, or descends from it."""
    try:
        return os.getsid(pid) == leader or any(p.pid == leader for p in psutil.Process(pid).parents())
    except (OSError, psutil.Error):  # it has ended, or has another number in this container
        return False


def attempt_lock(job: Job, number: int) -> Path:
    """The lock that an attempt holds while any of its processes lives."""
    return job.state.with_name(f"{job.id}.{number}.lock")


def started_at(pid: int) -> float | None:
    """When a process began, in seconds since the epoch; None if it is gone."""
    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return None


def kill_group(pid: int | None, pid_started: float | None, signum: int, exit_file: Path | None = None) -> bool:
    """Signal a job's process group, unless another process has its number now. Returns whether the signal was sent.

    Args:
        exit_file: of the attempt. The process around it names it; when it began seems another time once the clock was set.
    """
    if pid is None or pid <= 1:  # 0 and -1 would mean this group, and every process
        return False
    began = started_at(pid)
    another = began is not None and pid_started is not None and abs(began - pid_started) > 1
    if another and not (exit_file and _names(pid, exit_file)):
        return False
    try:
        os.killpg(pid, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _names(pid: int, path: Path) -> bool:
    """Whether the command of a process names a file."""
    try:
        return str(path) in psutil.Process(pid).cmdline()
    except psutil.Error:
        return False


def stop_orphan(job: Job, attempt: Attempt, number: int) -> bool:
    """Tell an attempt without a scheduler to save and end. Returns whether it was running."""
    exit_file = job.attempt_log(number).with_suffix(".exit")
    return is_locked(attempt_lock(job, number)) and kill_group(
        attempt.pid, attempt.pid_started, signal.SIGTERM, exit_file
    )


def orphan_ending(job: Job, attempt: Attempt, number: int) -> Ending | None:
    """How an attempt of this machine without a scheduler ended; None if it runs or left no trace."""
    lock = attempt_lock(job, number)
    exit_file = job.attempt_log(number).with_suffix(".exit")
    if attempt.host != platform.node() or is_locked(lock) or not (lock.exists() or exit_file.exists()):
        return None
    return Ending(_exit_code(exit_file))


def _exit_code(path: Path) -> int | None:
    try:
        code = read_json(path)["exit_code"]
    except (FileNotFoundError, CheckpointError, KeyError):  # the lock tells whether the attempt runs
        return None
    return code if isinstance(code, int) else None
