"""`--on ray`: the same jobs on a Ray cluster. Ray picks a machine with free GPUs; there, a job runs as on any one machine.

Each attempt is an actor (`RayNode`) that holds the GPUs while the job runs. All nodes must see the job's folder and the current
folder at the same path, on a shared disk: nothing is copied. A job whose node is lost resumes on another node from its last
checkpoint.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import os
import platform
import socket
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from elman_bench.jobs.gpus import choose, monitor
from elman_bench.jobs.job import LOST, PYTHON, Attempt, Ending, Job, Slot
from elman_bench.jobs.local import LocalExecutor
from elman_bench.jobs.locks import is_locked
from elman_bench.jobs.slots import THREADS, CpuSlots, GpuSlots, cores

from elman_core.extension import ConfigError, ElmanError, packages, storage_errors

_LOOK = 5.0  # seconds between two looks at the cluster, and at a GPU that someone outside Ray uses
_POLL = 1.0  # seconds that a node waits for its job to end before it answers
_UNLOCKED = 60.0  # seconds for the previous attempt to finish saving and release its run folder
_LIBRARIES = ("torch", "transformers", "numpy", "schedulefree")
_OF_THE_NODE = ("ELMAN_CACHE", "ELMAN_LOCKS")  # variables that name places on one machine


class RayNode:
    """The actor: a place on a node and the job in it, run by `LocalExecutor`. It imports neither torch nor Ray."""

    def __init__(self) -> None:
        self.executor: LocalExecutor | None = None
        self.handle: Any = None

    def take(self, gpus: int, who: str, folder: str, token: str, wanted: Mapping[str, str]) -> Slot | str:
        """The slot, or why it cannot be used now. Ray has already decided which GPUs it has.

        Args:
            folder: where the driver works. token: a file that the driver wrote beside the jobs. wanted: the driver's software.

        Raises:
            ConfigError: this node has other software, does not see these paths, or its GPUs cannot be queried.
        """
        host, visible = platform.node(), os.environ.get("CUDA_VISIBLE_DEVICES", "")
        if different := differences(wanted, software()):
            more = f" and {len(different) - 1} more" if len(different) > 1 else ""
            raise ConfigError(f"node {host} has other software: {different[0]}{more}; install the same there")
        for path in (folder, token):
            if not os.path.exists(path):
                raise ConfigError(
                    f"node {host} does not see {path if path == folder else os.path.dirname(path)}: with --on ray, the "
                    f"jobs' folder and the current folder must be on a disk that all nodes share, at the same path"
                )
        os.chdir(folder)
        tether = (*PYTHON, "-m", "elman_ray.tether", str(os.getpid()))
        driver = monitor() if gpus else None
        found = driver.gpus() if driver else []
        if driver is None or not found:
            self.executor = LocalExecutor(CpuSlots(1), child=tether)
            name = f"gpu {visible} of {host}" if gpus else f"cpu of {host}"
            return Slot(name, host, (), {"CUDA_VISIBLE_DEVICES": visible, **_threads(1)})
        slots = GpuSlots(choose(found, "auto", "", visible), driver)
        self.executor = LocalExecutor(slots, driver, tether)
        place = slots.take(gpus, who)
        if place is None:
            return f"{host}: {self.executor.why}"
        environment = {**place.env, **_threads(max(1, cores() // len(found)))}
        return dataclasses.replace(place, name=f"{place.name} of {host}", env=environment)

    def start(
        self, job: Job, slot: Slot, command: tuple[str, ...], number: int, python: str
    ) -> tuple[Ending | None, list[str]]:
        """Start an attempt, once an earlier attempt has released the run's folder. Returns the same as `poll`.

        Args:
            python: the driver's interpreter; this node's own takes its place in the command.
        """
        assert self.executor is not None
        end = time.monotonic() + _UNLOCKED
        while job.run is not None and is_locked(job.run / ".lock") and time.monotonic() < end:
            time.sleep(0.2)
        words = tuple(sys.executable if word == python else word for word in command)
        self.handle = self.executor.start(job, slot, words, Attempt(), number)
        return None, []

    def poll(self) -> tuple[Ending | None, list[str]]:
        """How the attempt ended (None while it runs) and the strangers on its GPUs. Waits about a second for the end."""
        assert self.executor is not None
        end = time.monotonic() + _POLL
        while (ending := self.executor.poll(self.handle)) is None and time.monotonic() < end:
            time.sleep(0.05)
        return ending, [] if ending else self.executor.contended(self.handle)

    def stop(self, now: bool) -> None:
        """As `Executor.stop`."""
        assert self.executor is not None
        self.executor.stop(self.handle, now)


@dataclass
class _Place:
    """An actor that was asked for. Its answer is a `Slot`, or the reason why it cannot be used yet."""

    actor: Any
    gpus: int
    answer: Any
    busy: str = ""
    tried: float = 0.0


@dataclass
class _Running:
    """An attempt on a node, and the answer that the node owes."""

    actor: Any
    host: str
    answer: Any
    strangers: list[str] = field(default_factory=list)


class RayExecutor:
    """`Executor` on a Ray cluster.

    Args:
        address: of the cluster; by default RAY_ADDRESS, or the cluster that this machine belongs to.
        gpus: whether each job takes GPUs (by default, if the cluster has any) or one CPU.

    Raises:
        ConfigError: no cluster answers.
    """

    def __init__(self, address: str | None = None, gpus: bool | None = None) -> None:
        self.ray = connect(address)
        self.uses_gpus = self.ray.cluster_resources().get("GPU", 0) > 0 if gpus is None else gpus
        self.why = ""
        self._software = software()
        self._actor = self.ray.remote(RayNode)
        self._asked: dict[int, list[_Place]] = {}  # by the number of GPUs
        self._held: dict[int, _Place] = {}  # by the id of the slot: two nodes may have slots of the same name
        self._tokens: dict[Path, Path] = {}
        self._largest, self._looked = 0.0, -_LOOK

    @property
    def words(self) -> str:
        """The places, in words."""
        each = [count for count in self._resources() if count]
        nodes = f"{len(each)} node{'s' if len(each) > 1 else ''}"
        return f"one job on each {self._kind} of a Ray cluster: {sum(each):g} on {nodes}"

    def slot(self, job: Job) -> Slot | None:
        gpus = job.gpus if self.uses_gpus else 0
        self._check_size(job)
        asked = self._asked.setdefault(gpus, [])
        if all(place.busy for place in asked):  # a busy GPU is kept, or Ray would offer it again; ask for another one
            asked.append(self._ask(gpus, job))
        self.why = f"Ray has no free {self._kind} yet"
        for place in list(asked):
            if not self.ray.wait([place.answer], timeout=0)[0]:
                self.why = place.busy or self.why
                continue
            answer = self._answer(place, job)
            if isinstance(answer, Slot):
                asked.remove(place)
                self._held[id(answer)] = place
                return answer
            self.why = answer
        return None

    def _answer(self, place: _Place, job: Job) -> Slot | str:
        try:
            answer = self.ray.get(place.answer)
        except self.ray.exceptions.RayError as error:
            self._asked[place.gpus].remove(place)
            self._kill(place)
            cause = getattr(error, "cause", None)
            if isinstance(cause, ElmanError):
                raise ConfigError(str(cause)) from error
            if "ModuleNotFoundError" in str(error):
                raise ConfigError(
                    f"a node of the Ray cluster cannot import elman: {last_line(error)}; install the same packages there"
                ) from error
            return f"a node was lost: {last_line(error)}"
        if isinstance(answer, str):
            place.busy = answer
            if time.monotonic() - place.tried > _LOOK:
                place.tried = time.monotonic()
                place.answer = self._take(place.actor, place.gpus, job)
        return answer

    def start(self, job: Job, slot: Slot, command: tuple[str, ...], attempt: Attempt, number: int) -> _Running:
        attempt.host, attempt.slot = slot.host, slot.name
        attempt.gpu_uuid = ",".join(slot.gpus) or None
        attempt.log = str(job.attempt_log(number))
        ours = {k: v for k, v in os.environ.items() if k.startswith("ELMAN_") and k not in _OF_THE_NODE}
        ours |= {k: v for k in THREADS if (v := os.environ.get(k) or os.environ.get("OMP_NUM_THREADS"))}
        far = dataclasses.replace(job, env={**ours, **job.env}, prepare=None)  # a function need not travel
        actor = self._held[id(slot)].actor
        return _Running(actor, slot.host, actor.start.remote(far, slot, command, number, sys.executable))

    def adopt(self, job: Job, attempt: Attempt, number: int) -> None:
        """Nothing: actors end with their scheduler, and their jobs with them."""

    def poll(self, handle: _Running) -> Ending | None:
        if not self.ray.wait([handle.answer], timeout=0)[0]:
            return None
        errors = self.ray.exceptions
        try:
            ending, handle.strangers = self.ray.get(handle.answer)
        except errors.ActorUnavailableError:  # perhaps for a moment; if not, the next call says that it died
            ending = None
        except errors.RayActorError:
            return Ending(None, f"lost node {handle.host}", LOST)
        except errors.RayTaskError as error:
            return Ending(None, last_line(error), LOST)
        if ending is None:
            handle.answer = handle.actor.poll.remote()
        return ending

    def contended(self, handle: _Running) -> list[str]:
        return handle.strangers

    def stop(self, handle: _Running, now: bool = False) -> None:
        handle.actor.stop.remote(now)

    def release(self, slot: Slot) -> None:
        self._kill(self._held.pop(id(slot)))

    def close(self) -> None:
        for place in (*itertools.chain.from_iterable(self._asked.values()), *self._held.values()):
            self._kill(place)
        self._asked.clear()
        self._held.clear()
        for token in self._tokens.values():
            token.unlink(missing_ok=True)
        self._tokens.clear()

    @property
    def _kind(self) -> str:
        return "GPU" if self.uses_gpus else "CPU"

    def _resources(self) -> list[float]:
        """GPUs (or CPUs) of each live node."""
        return [node["Resources"].get(self._kind, 0.0) for node in self.ray.nodes() if node["Alive"]]

    def _ask(self, gpus: int, job: Job) -> _Place:
        """An actor, which Ray starts as soon as a node has room for it."""
        resources = {"num_gpus": gpus, "num_cpus": 0} if self.uses_gpus else {"num_cpus": 1}
        actor = self._actor.options(**resources, max_restarts=0, scheduling_strategy="SPREAD").remote()
        return _Place(actor, gpus, self._take(actor, gpus, job))

    def _take(self, actor: Any, gpus: int, job: Job) -> Any:
        root = job.state.parent.parent.absolute()
        if root not in self._tokens:
            token = root / f".shared-{uuid.uuid4().hex}"
            with storage_errors(f"cannot write {root}"):
                root.mkdir(parents=True, exist_ok=True)
                token.touch()
            self._tokens[root] = token
        who = f"{job.id} of {platform.node()}:{root}"
        return actor.take.remote(gpus, who, os.getcwd(), str(self._tokens[root]), self._software)

    def _kill(self, place: _Place) -> None:
        self.ray.kill(place.actor, no_restart=True)

    def _check_size(self, job: Job) -> None:
        """Raise `ConfigError` if no node has ever had what the job takes; a lost node may come back."""
        if time.monotonic() - self._looked >= _LOOK:
            self._looked = time.monotonic()
            self._largest = max([self._largest, *self._resources()])
        if not self.uses_gpus and job.gpus > 1:
            raise ConfigError(f"job {job.id} takes {job.gpus} GPUs, and no GPU of the Ray cluster may be used")
        wanted = job.gpus if self.uses_gpus else 1
        if self._largest < wanted:
            raise ConfigError(
                f"job {job.id} takes {wanted} {self._kind}{'s' if wanted > 1 else ''}, and no node of the Ray cluster has "
                f"that many: at most {self._largest:g}"
            )


def connect(address: str | None = None) -> Any:
    """Ray, connected to a running cluster; the module.

    Raises:
        ConfigError: no cluster answers.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = importlib.import_module("ray")
    if ray.is_initialized():
        return ray
    where = address or os.environ.get("RAY_ADDRESS") or "auto"
    host, _, port = where.rpartition(":")
    try:
        if port.isdecimal() and "/" not in host:
            socket.create_connection((host.strip("[]"), int(port)), 10).close()  # Ray itself tries again for minutes
        ray.init(address=where, log_to_driver=False, logging_level="ERROR")
    except (OSError, OverflowError, ValueError, RuntimeError) as error:
        hint = "start one with ray start --head --disable-usage-stats --include-dashboard=false, or set RAY_ADDRESS"
        raise ConfigError(f"no Ray cluster answers at {where}: {last_line(error)}; {hint}") from error
    # When a node dies, Ray prints its log to standard output in spite of `log_to_driver`. Tables and JSON belong there.
    private: Any = importlib.import_module("ray._private.worker")
    private._worker_logs_enabled = False
    return ray


def _threads(count: int) -> dict[str, str]:
    """Not `slots.threads`: in an actor without a CPU Ray sets OMP_NUM_THREADS to 1. What the user has set is the driver's."""
    return dict.fromkeys(THREADS, str(count))


def software() -> dict[str, str]:
    """Versions that must be the same on all nodes that take part in a comparison."""
    found = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in _LIBRARIES:
        found[name] = metadata.version(name).partition("+")[0]  # "+cu130" and "+cpu" compute the same function
    found["elman-core"] = metadata.version("elman-core")
    return found | {dist.name: dist.version for dist in packages().values()}


def differences(here: Mapping[str, str], there: Mapping[str, str]) -> list[str]:
    """Return the differences of that machine, in words."""
    return [
        f"{name} is {there.get(name, 'not installed')} there and {here.get(name, 'not installed')} here"
        for name in sorted({*here, *there})
        if here.get(name) != there.get(name)
    ]


def last_line(error: BaseException) -> str:
    """The last line of an error, which is where Ray puts the reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
