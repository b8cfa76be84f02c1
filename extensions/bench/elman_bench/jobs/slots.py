"""Slots for jobs on this machine: its free GPUs, or shares of its processor if it has no GPU."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from elman_bench.memory import available
from elman_core.extension import ConfigError

from .gpus import Gpu, GpuLostError, Nvml, busy
from .job import Slot
from .locks import MACHINE_WIDE, Lock, SharedLock, holder, is_locked

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
QUOTA = Path("/sys/fs/cgroup/cpu.max")  # "max 100000", or microseconds of each period
MEMORY_A_SLOT = 2 * 2**30  # bytes that a small training on the CPU takes, with room


class GpuSlots:
    """GPUs, each taken with a lock that all schedulers of the machine respect, and only if the driver shows it free.

    Args:
        gpus: the GPUs that may be taken. monitor: the driver. folder: of the locks, one file per GPU, named by its UUID.
        share: jobs of this scheduler that use a GPU at once. Above 1 no job's speed is its own.
    """

    def __init__(self, gpus: Sequence[Gpu], monitor: Nvml, folder: Path | None = None, share: int = 1) -> None:
        self.gpus, self.monitor, self.folder, self.share = list(gpus), monitor, folder or lock_folder(), share
        self.held: dict[str, Lock] = {}
        self.users: Counter[str] = Counter()  # jobs on each GPU that is held
        self.why: dict[str, str] = {}  # for each GPU, why it could not be taken when last tried
        self.threads = max(1, cores() // max(1, len(self.gpus) * share))

    def take(self, count: int, who: str) -> Slot | None:
        """A slot of `count` GPUs for `who`, or None if fewer are free; then `why` gives the reasons.

        Raises:
            ConfigError: there are fewer than `count` GPUs, free or not.
        """
        if count > len(self.gpus):
            raise ConfigError(f"a job that needs {count} GPUs can never start: only {len(self.gpus)} may be used")
        taken: list[Gpu] = []
        for gpu in sorted(self.gpus, key=lambda gpu: self.users[gpu.uuid]):
            room = self.users[gpu.uuid] < self.share
            if len(taken) < count and room and (gpu.uuid in self.held or self._take(gpu, who)):
                taken.append(gpu)
        uuids = tuple(gpu.uuid for gpu in taken)
        self.users.update(uuids)
        if len(taken) < count:
            self._give(uuids)
            return None
        env = {"CUDA_VISIBLE_DEVICES": ",".join(uuids), **threads(self.threads)}
        return Slot("gpu " + ",".join(str(gpu.index) for gpu in taken), platform.node(), uuids, env)

    def locks(self, slot: Slot) -> list[Lock]:
        """The locks of a slot, which its process inherits."""
        return [self.held[uuid] for uuid in slot.gpus if uuid in self.held]

    def give(self, slot: Slot) -> None:
        """Give a slot back."""
        self._give(slot.gpus)

    def retire(self, uuid: str) -> None:
        """Never take a GPU again."""
        self.gpus = [gpu for gpu in self.gpus if gpu.uuid != uuid]

    def close(self) -> None:
        """Release every lock; a process that inherited one keeps it."""
        self.users.clear()
        self._give(list(self.held))

    def _take(self, gpu: Gpu, who: str) -> bool:
        lock_file = self.folder / f"{gpu.uuid}.lock"
        try:
            lock = SharedLock(lock_file)
        except BlockingIOError:
            self.why[gpu.uuid] = f"gpu {gpu.index}: taken by {holder(lock_file)}"
            return False
        if reason := _why_busy(gpu, self.monitor):
            lock.close()
            self.why[gpu.uuid] = f"gpu {gpu.index}: {reason}"
            return False
        lock.write(f"{who} (pid {os.getpid()})\n")
        self.held[gpu.uuid] = lock
        self.why.pop(gpu.uuid, None)
        return True

    def _give(self, uuids: Iterable[str]) -> None:
        for uuid in uuids:
            if uuid not in self.held:  # of an adopted job
                continue
            self.users[uuid] -= 1
            if self.users[uuid] <= 0:
                self.held.pop(uuid).close()


class CpuSlots:
    """Shares of the processor: `count` jobs at once, which divide its threads."""

    def __init__(self, count: int | None = None) -> None:
        self.count = count or cpu_slots()
        self.threads = max(1, cores() // self.count)
        self.free = list(range(self.count))
        self.why: dict[str, str] = {}

    def take(self, count: int, who: str) -> Slot | None:
        """A slot, or None if all are in use. Raises `ConfigError` for a job that needs several GPUs."""
        if count > 1:
            raise ConfigError(f"a job that needs {count} GPUs can never start: no GPU may be used")
        if not self.free:
            return None
        name = f"cpu {self.free.pop(0)}"
        return Slot(name, platform.node(), (), {"CUDA_VISIBLE_DEVICES": "", **threads(self.threads)})

    def locks(self, slot: Slot) -> list[Lock]:
        return []

    def give(self, slot: Slot) -> None:
        kind, _, number = slot.name.partition(" ")
        if kind == "cpu" and int(number) < self.count:  # an adopted job may have a GPU
            self.free = sorted({*self.free, int(number)})

    def occupy(self, name: str) -> None:
        """Mark the slot of an adopted job as taken."""
        self.free = [number for number in self.free if f"cpu {number}" != name]

    def close(self) -> None:
        return


def _why_busy(gpu: Gpu, monitor: Nvml) -> str:
    """Why a GPU that no scheduler has taken is not free, or an empty string."""
    try:
        look = monitor.look(gpu.uuid)
        return busy(look, monitor.strangers(look, ()))
    except GpuLostError as error:
        return str(error)


def survey(gpus: Sequence[Gpu], monitor: Nvml, folder: Path | None = None) -> list[dict[str, str]]:
    """The state of each GPU for `elman jobs status`: "free", who took it, or why it is not free."""
    rows = []
    folder = folder or lock_folder()
    for gpu in gpus:
        lock_file = folder / f"{gpu.uuid}.lock"
        reason = _why_busy(gpu, monitor) or "free"
        if is_locked(lock_file):
            reason = f"taken by {holder(lock_file)}"
        rows.append({"gpu": str(gpu.index), "name": gpu.name, "uuid": gpu.uuid, "state": reason})
    return rows


def lock_folder() -> Path:
    """The folder of the GPUs' locks: ELMAN_LOCKS, or one for the whole machine."""
    return Path(os.environ.get("ELMAN_LOCKS") or MACHINE_WIDE)


def threads(count: int) -> dict[str, str]:
    """Variables that make the libraries of a process use `count` threads; the user's own settings stay."""
    each = os.environ.get("OMP_NUM_THREADS") or str(count)  # torch prefers MKL's number, so that follows OpenMP's
    return {name: os.environ.get(name) or each for name in THREADS}


def cores() -> int:
    """Number of cores that this process may use, which a container's quota may reduce."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = QUOTA.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return allowed
    return allowed if quota == "max" else max(1, min(allowed, int(quota) // int(period)))


def cpu_slots() -> int:
    """One slot per core, or fewer if memory is short: small trainings run best on one thread each."""
    return max(1, min(cores(), available() // MEMORY_A_SLOT))
