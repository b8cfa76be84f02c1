"""`--on ray`: the same jobs on a Ray cluster. Ray finds a machine with a free GPU; the rest is as on one machine.

Every attempt is an actor that holds the GPUs for as long as the job runs, and a thread here that sends it what it needs and
brings back what it writes, as it writes it. A job whose node is lost goes on elsewhere, from the last checkpoint that came
back. Where the nodes share the suite's folder, nothing is copied.
"""

from __future__ import annotations

import importlib
import itertools
import os
import platform
import time
from dataclasses import dataclass
from typing import Any

from elman_core.registry.errors import ConfigError, ElmanError

from .job import Attempt, Ending, Job, Slot
from .ray_attempt import RayAttempt, last_line
from .ray_node import RayNode, differences, software

_LOOK = 5.0  # seconds between two looks at the cluster


class RayExecutor:
    """`Executor` on a Ray cluster.

    Args:
        address: of the cluster; RAY_ADDRESS or the one that this machine belongs to by default.
        gpus: whether jobs take GPUs; by default, if the cluster has any. Else each takes one CPU.
        shared: whether nodes see the folder of the jobs; found out by default.

    Raises:
        ConfigError: Ray is not installed, or there is no cluster.
    """

    def __init__(self, address: str | None = None, gpus: bool | None = None, shared: bool | None = None) -> None:
        self.ray = connect(address)
        resources = self.ray.cluster_resources()
        self.uses_gpus = resources.get("GPU", 0) > 0 if gpus is None else gpus
        self.shared = shared
        self.why = ""
        self._software = software()
        self._actor = self.ray.remote(RayNode)
        self._asked: dict[int, list[_Asked]] = {}  # by the number of GPUs
        self._held: dict[int, tuple[Slot, Any]] = {}  # places and their actors; two on one machine may have one name
        self._largest, self._looked = 0.0, -_LOOK

    @property
    def words(self) -> str:
        """The places, in words."""
        what = "GPU" if self.uses_gpus else "CPU"
        each = [n for n in (node["Resources"].get(what, 0) for node in self.ray.nodes() if node["Alive"]) if n]
        return (
            f"one job on each {what} of a Ray cluster: {sum(each):g} on {len(each)} node{'s' if len(each) > 1 else ''}"
        )

    def slot(self, job: Job) -> Slot | None:
        wanted = job.gpus if self.uses_gpus else 0
        self._check_size(job)
        asked = self._asked.setdefault(wanted, [])
        if all(one.busy for one in asked):
            asked.append(self._ask(wanted, job))
        self.why = f"Ray has not given a {'GPU' if wanted else 'CPU'} yet"
        for one in list(asked):
            place = self._answer(one, job)
            if isinstance(place, Slot):
                asked.remove(one)
                self._held[id(place)] = place, one.actor
                return place
            self.why = place or self.why
        return None

    def _answer(self, one: _Asked, job: Job) -> Slot | str:
        """The place that an actor has, or why there is none yet; empty while Ray looks for one."""
        if not self.ray.wait([one.answer], timeout=0)[0]:
            return one.busy
        try:
            place, there = self.ray.get(one.answer), self.ray.get(one.software)
        except self.ray.exceptions.RayError as error:
            self._forget(one)
            if "ModuleNotFoundError" in str(error) or isinstance(getattr(error, "cause", None), ConfigError):
                raise ConfigError(_of_node(error)) from error
            return f"a node was lost: {last_line(error)}"
        if isinstance(place, str):
            # Somebody who does not ask Ray is on this GPU. Given back, it would be the next that Ray gives.
            one.retry(place, self._who(job))
        elif different := differences(self._software, there):
            self._forget(one)
            more = f" and {len(different) - 1} more" if len(different) > 1 else ""
            raise ConfigError(
                f"node {place.host} would compute something else: {different[0]}{more}; install the same there"
            )
        return place

    def _forget(self, one: _Asked) -> None:
        self._asked[one.gpus].remove(one)
        self._release(one.actor)

    def start(self, job: Job, slot: Slot, command: tuple[str, ...], attempt: Attempt, number: int) -> RayAttempt:
        attempt.host, attempt.slot = slot.host, slot.name
        attempt.gpu_uuid = ",".join(slot.gpus) or None
        attempt.log = str(job.attempt_log(number))
        handle = RayAttempt(self.ray, self._held[id(slot)][1], job, slot, command, number, self.shared)
        handle.start()
        return handle

    def adopt(self, job: Job, attempt: Attempt, number: int) -> None:
        """Nothing: when the scheduler goes, so do its actors, and they stop their jobs."""

    def poll(self, handle: RayAttempt) -> Ending | None:
        return None if handle.is_alive() else handle.ending

    def contended(self, handle: RayAttempt) -> list[str]:
        return list(handle.strangers)

    def stop(self, handle: RayAttempt, now: bool = False) -> None:
        handle.stop(now)

    def release(self, slot: Slot) -> None:
        self._release(self._held.pop(id(slot))[1])

    def close(self) -> None:
        for asked in itertools.chain.from_iterable(self._asked.values()):
            self._release(asked.actor)
        self._asked.clear()
        for _, actor in self._held.values():  # a scheduler that failed leaves some
            self._release(actor)
        self._held.clear()

    def _ask(self, gpus: int, job: Job) -> _Asked:
        """An actor that Ray starts as soon as it has room for it."""
        resources = {"num_gpus": gpus, "num_cpus": 0} if self.uses_gpus else {"num_cpus": 1}
        actor = self._actor.options(**resources, max_restarts=0, scheduling_strategy="SPREAD").remote()
        return _Asked(actor, gpus, actor.take.remote(gpus, self._who(job)), actor.software.remote())

    def _who(self, job: Job) -> str:
        return f"{job.id} of {platform.node()}:{job.state.parent.parent.absolute()}"

    def _release(self, actor: Any) -> None:
        self.ray.kill(actor, no_restart=True)

    def _check_size(self, job: Job) -> None:
        """Raise `ConfigError` if no node has ever had what the job takes; one that is lost may come back."""
        if time.monotonic() - self._looked >= _LOOK:
            self._looked = time.monotonic()
            what = "GPU" if self.uses_gpus else "CPU"
            alive = [n["Resources"].get(what, 0.0) for n in self.ray.nodes() if n["Alive"]]
            self._largest = max([self._largest, *alive])
        if not self.uses_gpus and job.gpus > 1:
            raise ConfigError(f"job {job.id} takes {job.gpus} GPUs, and the Ray cluster has none that may be used")
        if self._largest < (job.gpus if self.uses_gpus else 1):
            what = f"{job.gpus} GPUs" if self.uses_gpus else "a CPU"
            raise ConfigError(
                f"job {job.id} takes {what}, and no node of the Ray cluster has that: at most {self._largest:g}"
            )


@dataclass
class _Asked:
    """An actor that has been asked for: its answer is the place, or why it cannot be taken."""

    actor: Any
    gpus: int
    answer: Any
    software: Any
    busy: str = ""
    tried: float = 0.0

    def retry(self, why: str, who: str) -> None:
        """Ask again, now and then."""
        self.busy = why
        if time.monotonic() - self.tried > _LOOK:
            self.tried = time.monotonic()
            self.answer = self.actor.take.remote(self.gpus, who)


def connect(address: str | None = None) -> Any:
    """Ray, connected to a running cluster; the module.

    Raises:
        ConfigError: Ray is not installed, or no cluster runs there.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError("--on ray needs Ray: pip install 'elman-core[ray]'") from error
    if ray.is_initialized():
        return ray
    where = address or os.environ.get("RAY_ADDRESS") or "auto"
    try:
        ray.init(address=where, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError) as error:
        hint = "ray start --head --disable-usage-stats --include-dashboard=false starts one, RAY_ADDRESS names another"
        raise ConfigError(f"no Ray cluster answers at {where}: {last_line(error)}; {hint}") from error
    # Of a node that dies Ray prints the log to standard output, whatever `log_to_driver` says; there, tables and JSON stand.
    private: Any = importlib.import_module("ray._private.worker")
    private._worker_logs_enabled = False
    return ray


def _of_node(error: Any) -> str:
    cause = getattr(error, "cause", None)
    if isinstance(cause, ElmanError):
        return f"a node of the Ray cluster says: {cause}"
    return f"a node of the Ray cluster lacks this program: {last_line(error)}; install the same packages there"
