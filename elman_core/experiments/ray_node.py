"""The far end of `--on ray`: what runs on a node of the cluster, for one attempt of one job. Without torch, and without Ray.

The job itself is a process of `LocalExecutor`: GPUs are locked against schedulers of that machine, looked at through its
driver, and watched for strangers, as on one machine.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import os
import platform
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from elman_core.data import ByteFile, cache_folder
from elman_core.registry.errors import DataError
from elman_core.registry.plugins import GROUP

from .gpus import choose
from .job import Attempt, Ending, Job, Slot
from .local import LocalExecutor
from .locks import is_locked
from .mirror import Piece, Receiver, Sender
from .nvml import monitor
from .slots import CpuSlots, GpuSlots, cores, threads

PYTHON = "{python}"
"""Stands for the interpreter in a command."""
_SOURCES = (".py", ".h", ".cuh", ".cu", ".cpp")
_LIBRARIES = ("torch", "transformers", "numpy", "schedulefree")
_UNLOCKED = 60.0  # seconds that a run of an earlier attempt may take to let go of its folder


@dataclass(frozen=True)
class Told:
    """What a node says of an attempt: how it ended, if it has; strangers on its GPUs; files; whether there is more to fetch."""

    ending: Ending | None
    strangers: list[str]
    pieces: list[Piece]
    more: bool


@dataclass(frozen=True)
class Text:
    """A training text as a run knows it."""

    path: str
    fingerprint: Mapping[str, Any]


class RayNode:
    """One place on a node, and the job in it. Every method is short; the driver calls them in turn."""

    def __init__(self) -> None:
        self.executor: LocalExecutor | None = None
        self.place: Slot | None = None
        self.root: Path | None = None
        self.own = False  # whether `root` is a copy of ours
        self.sender: Sender | None = None
        self.handle: Any = None
        self.ended: Ending | None = None
        self.told: tuple[int, Told] | None = None

    # the place

    def take(self, gpus: int, who: str) -> Slot | str:
        """The place, or why it cannot be taken now. The cluster has decided which GPUs it is.

        Raises:
            ConfigError: the GPUs of this machine cannot be asked.
        """
        host, visible = platform.node(), os.environ.get("CUDA_VISIBLE_DEVICES", "")
        driver = monitor()
        found = driver.gpus()
        if gpus and found:
            executor = LocalExecutor(GpuSlots(choose(found, "auto", "", visible), driver), driver)
            place = executor.slots.take(gpus, who)
            if place is None:
                return f"{host}: {executor.why}"
            each = {**place.env, **threads(max(1, cores() // len(found)))}
            place = dataclasses.replace(place, name=f"{place.name} of {host}", env=each)
        else:
            executor = LocalExecutor(CpuSlots(1))
            name = f"gpu {visible} of {host}" if gpus else f"cpu of {host}"
            place = Slot(name, host, (), {"CUDA_VISIBLE_DEVICES": visible, **threads(1)})
        self.executor, self.place = executor, place
        return place

    def software(self) -> dict[str, str]:
        """See `software`."""
        return software()

    # files

    def shares(self, token: str) -> bool:
        """Whether a file that the driver has written is here, too."""
        return Path(token).is_file()

    def text(self, text: Text) -> str | None:
        """Where a text with this fingerprint is: at its own path, or sent before; None if it is not here."""
        for path in (Path(text.path), sent_text(text)):
            try:
                if path.is_absolute() and ByteFile(path).fingerprint() == text.fingerprint:
                    return str(path)
            except DataError:
                continue
        return None

    def take_text(self, text: Text, data: bytes, offset: int, last: bool) -> None:
        """A part of a text that is sent."""
        path = sent_text(text)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb" if offset == 0 else "ab") as out:
            out.write(data)
        if last:
            os.replace(partial, path)

    def prepare(self, id: str, root: str | None) -> str:
        """The folder in which the job finds its files: `root`, where it is shared, or a new one of its own."""
        self.own = root is None
        if root is not None:
            self.root = Path(root)
        else:
            folder = cache_folder() / "ray" / "jobs"
            _remove_orphans(folder)
            self.root = folder / f"{id}-{platform.node()}-{os.getpid()}"
            shutil.rmtree(self.root, ignore_errors=True)
            self.root.mkdir(parents=True)
        return str(self.root)

    def put(self, pieces: list[Piece]) -> None:
        """Files that the job begins with."""
        assert self.root is not None
        receiver = Receiver(self.root)
        for piece in pieces:
            receiver.put(piece)

    # the job

    def begin(self, job: Job, command: tuple[str, ...], number: int, folder: str | None) -> None:
        """Start the attempt. Its paths are below the folder of `prepare`.

        Args:
            folder: where the driver works, for commands that name files from there; used if it exists here.
        """
        assert self.executor is not None
        assert self.place is not None
        assert self.root is not None
        if folder is not None and os.path.isdir(folder):
            os.chdir(folder)
        elif self.own:
            os.chdir(self.root)
        if job.run is not None:
            _wait_until_free(job.run / ".lock")
        if self.own:
            self.sender = Sender(self.root, job.run, [job.attempt_log(number)])
        words = [sys.executable if word == PYTHON else word for word in command]
        tethered = (sys.executable, "-m", "elman_core.experiments.tether", str(os.getpid()), *words)
        self.handle = self.executor.start(job, self.place, tethered, Attempt(), number)

    def tell(self, question: int) -> Told:
        """How the attempt is doing, and what its files have become. To the same question again, the same answer: the first
        may have been lost on its way.
        """
        assert self.executor is not None
        if self.told is not None and self.told[0] == question:
            return self.told[1]
        if self.ended is None:
            self.ended = self.executor.poll(self.handle)  # before the files are read, which then are the last
        strangers = self.executor.contended(self.handle) if self.ended is None else []
        pieces, whole = self.sender.batch() if self.sender is not None else ([], True)
        self.told = question, Told(self.ended, strangers, pieces, not whole)
        return self.told[1]

    def stop(self, now: bool) -> None:
        """As `Executor.stop`."""
        if self.executor is not None and self.handle is not None and self.ended is None:
            self.executor.stop(self.handle, now)

    def clear(self) -> None:
        """Remove what was copied here for the job, and give the place back."""
        if self.own and self.root is not None:
            shutil.rmtree(self.root, ignore_errors=True)
        if self.executor is not None:
            self.executor.close()


def sent_text(text: Text) -> Path:
    """Where a node keeps a text that it was sent."""
    return cache_folder() / "ray" / "texts" / str(text.fingerprint["blake2b"])


def software() -> dict[str, str]:
    """What must be the same on every machine that takes part in a comparison: versions, and the sources of this project."""
    found = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in _LIBRARIES:
        found[name] = metadata.version(name).partition("+")[0]  # "+cu130" and "+cpu" compute the same function
    packages = {"elman-core": "elman_core", "elman-csrc": "elman_csrc"}
    for point in metadata.entry_points(group=GROUP):
        if point.dist is not None:
            packages[point.dist.name] = point.module.partition(".")[0]
    for name, module in sorted(packages.items()):
        spec = importlib.util.find_spec(module)  # a package is found without running it
        if spec is not None and spec.origin is not None:
            found[name] = f"{metadata.version(name)}, sources {_digest(Path(spec.origin).parent)}"
    return found


def differences(here: Mapping[str, str], there: Mapping[str, str]) -> list[str]:
    """In words, what is not the same there."""
    return [
        f"{name} is {there.get(name, 'not installed')} there and {here.get(name, 'not installed')} here"
        for name in sorted({*here, *there})
        if here.get(name) != there.get(name)
    ]


def _digest(folder: Path) -> str:
    """A short hash of the sources below a folder."""
    digest = hashlib.blake2b(digest_size=4)
    for path in sorted(p for p in folder.rglob("*") if p.suffix in _SOURCES and "__pycache__" not in p.parts):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _remove_orphans(folder: Path) -> None:
    """Delete the copies of jobs whose process here died with the cluster's services; not while the job still saves."""
    for old in folder.glob(f"*-{platform.node()}-*") if folder.is_dir() else ():
        pid = old.name.rpartition("-")[2]
        running = pid.isdigit() and psutil.pid_exists(int(pid))
        if not running and not any(is_locked(lock) for lock in old.glob("jobs/*.lock")):
            shutil.rmtree(old, ignore_errors=True)


def _wait_until_free(lock: Path) -> None:
    """An earlier attempt may be saving yet: its training holds this lock."""
    end = time.monotonic() + _UNLOCKED
    while is_locked(lock) and time.monotonic() < end:
        time.sleep(0.2)
