"""A run is a folder: manifest.json, metrics.jsonl, checkpoints/, console.log. Only this file writes the first two."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import logging
import os
import shlex
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elman_core.locks import Lock, fcntl
from elman_core.metrics import METRICS, read_lines
from elman_core.registry import CheckpointError, ConfigError, StorageError
from elman_core.storage import (
    PARTIAL,
    AlteredError,
    appending,
    log_line,
    missing_folder,
    open_regular,
    read_json,
    replacing,
    require_text,
    storage_errors,
    write_json,
    write_text,
)
from elman_core.training.settings import RESUMABLE, RETUNABLE

log = logging.getLogger("elman_core")

MANIFEST, CONSOLE, CHECKPOINTS = "manifest.json", "console.log", "checkpoints"
LOCK = ".lock"


class RunFolder:
    """The files of one run, held by one process at a time. `manifest` is what manifest.json says; `update` changes both."""

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path, self.manifest = path, manifest
        self._metrics, self._console = appending(path / METRICS), appending(path / CONSOLE)
        self._lock = _lock(path)

    @classmethod
    def create(cls, path: Path | None, name: str) -> RunFolder:
        """A new folder: `path`, or `runs/<name>-<time>`. The remains of a run that was killed before its manifest are replaced.
        Raises `ConfigError` if `path` is not empty, or a recipe cannot name it, `StorageError` if it cannot be created."""
        if path is not None:
            require_text(path)
            if path.exists() and not (path.is_dir() and _not_begun(path)):
                on = f"elman resume {shlex.quote(str(path))} continues it"
                hint = on if (path / MANIFEST).exists() else "nothing is overwritten"
                raise ConfigError(f"{path} already exists: choose another --out ({hint})")
            with storage_errors(f"cannot make {path}"):
                path.mkdir(parents=True, exist_ok=True)
            return cls(path, {})
        now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        for attempt in range(100):
            suffix = f"-{attempt}" if attempt else ""
            path = Path("runs") / f"{name}-{now}{suffix}"
            with storage_errors(f"cannot make {path}"):
                try:
                    path.mkdir(parents=True)
                except FileExistsError:
                    continue
            return cls(path, {})
        raise StorageError(f"cannot find a free name like {path}")

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """The folder of a run to resume. Raises as `manifest_to_resume`, and `ConfigError` if a process is training in it."""
        return cls(path, manifest_to_resume(path))

    @property
    def id(self) -> str:
        """Tells the files of this run from those of another; runs of older versions have none."""
        return str(self.manifest.get("id", ""))

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    def update(self, **facts: Any) -> None:
        """Add facts to the manifest, written to disk in one step."""
        self.manifest.update(facts)
        write_json(self.path / MANIFEST, self.manifest)

    def forget_end(self) -> None:
        """Remove how an earlier process ended, because the run continues. Written to disk by the next `update`."""
        for fact in ("ended", "error", "steps_done", "result"):
            self.manifest.pop(fact, None)

    def record(self, **line: Any) -> None:
        """Append one object to metrics.jsonl."""
        with storage_errors(f"cannot write {self.path / METRICS}"):
            self._metrics.write(log_line(line, self.id) + "\n")
            self._metrics.flush()

    def sync_metrics(self) -> None:
        """Flush metrics to disk, before a checkpoint: it must never hold more steps than they do."""
        with storage_errors(f"cannot write {self.path / METRICS}"):
            if not (self.path / METRICS).exists():
                self._begin_again()
            os.fsync(self._metrics.fileno())

    def _begin_again(self) -> None:
        """Recreate files that were deleted during the training, so that the weights can still be saved."""
        log.warning("elman: %s was deleted during the training: it starts again", self.path / METRICS)
        self.path.mkdir(parents=True, exist_ok=True)
        self._metrics.close()
        self._metrics = appending(self.path / METRICS)
        write_json(self.path / MANIFEST, self.manifest)

    def cut_metrics(self, step: int) -> None:
        """Drop the lines after `step`, and a last line that a kill cut short. A copy of a damaged file is kept."""
        path = self.path / METRICS
        lines, damaged = _read_lines(self.path, self.id)
        kept = [line for line in lines if line["step"] <= step]
        lacking = step - len({line["step"] for line in kept if line["kind"] == "step"})
        self._metrics.close()
        aside = path.with_name(f"{METRICS}.damaged")
        if damaged:
            writing = storage_errors(f"cannot write {aside}")
            with writing, open(open_regular(path), "rb") as file, replacing(aside) as out:
                shutil.copyfileobj(file, out)
            log.warning("elman: %s has %d damaged, repeated or misplaced lines: kept as %s", path, damaged, aside.name)
        if lacking:
            log.warning("elman: %s lacks %d of the %d steps before this one; the run continues", path, lacking, step)
        write_text(path, "".join(log_line(line, self.id) + "\n" for line in kept))
        self._metrics = appending(path)

    def log(self, text: str) -> None:
        with storage_errors(f"cannot write {self.path / CONSOLE}"):
            self._console.write(text + "\n")
            self._console.flush()

    def discard(self) -> None:
        """Remove a new folder whose training cannot be built."""
        self.close()
        shutil.rmtree(self.path)

    def close(self) -> None:
        for opened in (self._metrics, self._console):
            with contextlib.suppress(OSError):  # a full disk was reported when the lines were written
                opened.close()
        if self._lock is not None:
            self._lock.close()


class NullRunFolder(RunFolder):
    """The folder of a run that another process writes: facts are kept in memory, nothing is written."""

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path, self.manifest = path, manifest

    def update(self, **facts: Any) -> None:
        self.manifest.update(facts)

    def _nothing(self, *_: Any, **__: Any) -> None:
        """Left to the process that writes the folder."""

    record = sync_metrics = cut_metrics = log = discard = close = _nothing


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a run. Raises `CheckpointError` if `path` is not one, or if the manifest is not what the run wrote."""
    if path.is_file():
        raise CheckpointError(f"{path} is a file; a run is a folder")
    try:
        return read_json(path / MANIFEST)
    except FileNotFoundError as error:
        if path.is_dir() and (path / LOCK).exists() and _not_begun(path):
            raise CheckpointError(
                f"{path} was killed before its first step: start it again with elman train and the same --out"
            ) from error
        trains_on = f"; to train this model on: elman train --init {shlex.quote(str(path))} --data FILE"
        is_model = (path / "config.json").is_file() or str(path).startswith("pretrained/")
        if not is_model and not path.exists():
            raise missing_folder(path) from error
        raise CheckpointError(f"{path} is not a run: it has no {MANIFEST}{trains_on if is_model else ''}") from error
    except AlteredError as error:
        changed = _changed(path, error.value) or "restore it from a copy"
        raise CheckpointError(f"{error}; {changed}") from error


def _changed(path: Path, manifest: Mapping[str, Any]) -> str:
    """Return the first setting that differs between a manifest and the last checkpoint, with what to do; "" if none does."""
    checkpoints = sorted((path / CHECKPOINTS).glob("step-*/state/trainer.json"))
    if not checkpoints:
        return ""
    last = checkpoints[-1]
    with contextlib.suppress(OSError, CheckpointError, KeyError, AttributeError, TypeError):
        stored, current = _by_key(read_json(last)), _by_key(manifest)
        chosen = {key for entry in manifest["resumed"] for key in entry.get("set", ())}
        kept = stored.keys() - chosen - {*RESUMABLE, "data.path", "train.steps", "train.minutes"}
        for key in sorted(kept & current.keys()):
            if current[key] != stored[key]:
                where = f"{key} is {current[key]!r} in {MANIFEST} and {stored[key]!r} in {last.parents[1].name}"
                purpose = f", then elman resume {shlex.quote(str(path))} --set {key}=…" if key in RETUNABLE else ""
                return f"{where}; put {stored[key]!r} back{purpose}"
    return ""


def _by_key(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Its settings as `{"table.name": value}`."""
    settings = manifest["settings"]
    return {f"{table}.{name}": value for table, values in settings.items() for name, value in values.items()}


# What resuming needs. These are written together, so a manifest that lacks one is another program's or was edited.
_NEEDED: dict[str, tuple[str, ...]] = {
    "settings": ("model", "data", "train"),
    "horizon": ("steps", "minutes"),
    "protocol": ("data",),
    "hardware": ("cpu_threads",),
    "made_with": (),
}


def manifest_to_resume(path: Path) -> dict[str, Any]:
    """The manifest of a run to resume. Raises `CheckpointError` if something needed for that is missing."""
    manifest = read_manifest(path)
    lacking = [name for name in _NEEDED if not isinstance(manifest.get(name), dict)]
    for name, keys in _NEEDED.items():
        lacking += [f"{name}.{key}" for key in keys if name not in lacking and key not in manifest[name]]
    lacking += [name for name, kind in (("status", str), ("resumed", list)) if not isinstance(manifest.get(name), kind)]
    if lacking:
        raise CheckpointError(f"{path} cannot be resumed: its {MANIFEST} has no {', '.join(lacking[:3])}")
    if changed := _changed(path, manifest):
        raise CheckpointError(f"{path} cannot be resumed: {changed}")
    return manifest


def _read_lines(path: Path, run: str) -> tuple[list[dict[str, Any]], int]:
    """The intact lines of metrics.jsonl by rising step, and the number of damaged, repeated and misplaced ones, not counting a
    last line that a kill cut short."""
    lines = list(read_lines(path, run))
    good = [line for line in lines if line is not None]
    once: dict[Any, dict[str, Any]] = {}
    for number, line in enumerate(good):
        is_single = line["kind"] in ("step", "evaluation")  # a step has at most one of these
        once[line["step"], line["kind"] if is_single else number] = line
    misplaced = sum(line["step"] > after["step"] for line, after in itertools.pairwise(good))
    return sorted(once.values(), key=lambda line: line["step"]), len(lines) - len(once) + misplaced


def _lock(path: Path) -> Lock | None:
    if fcntl is None:  # Windows, where two trainings in one folder go unnoticed
        return None
    try:
        return Lock(path / LOCK)
    except BlockingIOError as error:
        raise ConfigError(f"{path} is in use: another process is training in it") from error


def _not_begun(path: Path) -> bool:
    """Whether a folder is empty except for files that a run makes before its manifest."""
    made = (p.name in (LOCK, METRICS, CONSOLE) or p.name.startswith(PARTIAL) for p in path.iterdir())
    plain = all(stat.S_ISREG(p.lstat().st_mode) for p in path.iterdir())
    return plain and all(made) and (not (path / METRICS).exists() or (path / METRICS).stat().st_size == 0)
