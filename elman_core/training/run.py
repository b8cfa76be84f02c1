"""A run is a folder: manifest.json, metrics.jsonl, checkpoints/, console.log. Only this file writes the first two."""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import platform
import shlex
import shutil
import statistics
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

try:
    import fcntl
except ImportError:  # Windows, where two trainings in one folder go unnoticed
    fcntl = None  # type: ignore[assignment]

from elman_core.registry import CheckpointError, ConfigError, StorageError
from elman_core.storage import storage_errors, write_json, write_text

log = logging.getLogger("elman_core")

MANIFEST, METRICS, CONSOLE, CHECKPOINTS = "manifest.json", "metrics.jsonl", "console.log", "checkpoints"


class RunFolder:
    """The files of one run, held by one process at a time.

    Attributes:
        path: the folder. manifest: what manifest.json says; change it with `update`.
    """

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path, self.manifest = path, manifest
        self._lock = _lock(path)
        with storage_errors(f"cannot write {path}"):
            self._metrics = (path / METRICS).open("a", encoding="utf-8")
            self._console = (path / CONSOLE).open("a", encoding="utf-8")

    @classmethod
    def create(cls, path: Path | None, name: str) -> RunFolder:
        """A new folder: `path`, or `runs/<name>-<time>`.

        Raises:
            ConfigError: `path` exists and is not empty. StorageError: it cannot be created.
        """
        if path is not None:
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                hint = (
                    f"elman resume {shlex.quote(str(path))} continues it"
                    if (path / MANIFEST).exists()
                    else "nothing is overwritten"
                )
                raise ConfigError(f"{path} already exists: choose another --out ({hint})")
            with storage_errors(f"cannot make {path}"):
                path.mkdir(parents=True, exist_ok=True)
            return cls(path, {})
        now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        for attempt in range(100):
            path = Path("runs") / f"{name}-{now}{f'-{attempt}' if attempt else ''}"
            with storage_errors(f"cannot make {path}"):
                try:
                    path.mkdir(parents=True)
                except FileExistsError:
                    continue
            return cls(path, {})
        raise StorageError(f"cannot find a free name like {path}")

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """An existing folder. Raises `CheckpointError` if it is not a run, `ConfigError` if a process is training in it."""
        return cls(path, read_manifest(path))

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
            self._metrics.write(json.dumps(line) + "\n")
            self._metrics.flush()

    def sync_metrics(self) -> None:
        """Flush metrics to disk, before a checkpoint: it must never hold more steps than they do."""
        with storage_errors(f"cannot write {self.path / METRICS}"):
            if not (self.path / METRICS).exists():
                self._begin_again()
            os.fsync(self._metrics.fileno())

    def _begin_again(self) -> None:
        """Recreate files that were deleted during the training. What the model has learnt can still be saved."""
        log.warning("elman: %s was deleted during the training: it starts again", self.path / METRICS)
        self.path.mkdir(parents=True, exist_ok=True)
        self._metrics.close()
        self._metrics = (self.path / METRICS).open("a", encoding="utf-8")
        write_json(self.path / MANIFEST, self.manifest)

    def cut_metrics(self, step: int) -> None:
        """Drop the lines after `step`, and a line that a kill cut short."""
        path = self.path / METRICS
        kept = [json.dumps(line) for line in read_metrics(self.path) if line["step"] <= step]
        self._metrics.close()
        write_text(path, "".join(f"{line}\n" for line in kept))
        self._metrics = path.open("a", encoding="utf-8")

    def log(self, text: str) -> None:
        """Append lines to console.log."""
        with storage_errors(f"cannot write {self.path / CONSOLE}"):
            self._console.write(text + "\n")
            self._console.flush()

    def discard(self) -> None:
        """Remove a new folder whose training cannot be built."""
        self.close()
        shutil.rmtree(self.path)

    def close(self) -> None:
        """Release the folder."""
        for opened in (self._metrics, self._console):
            with contextlib.suppress(OSError):  # a full disk was reported when the lines were written
                opened.close()
        os.close(self._lock)


class Elsewhere(RunFolder):
    """The folder of a run that another process writes: facts are kept in memory, nothing is written."""

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path, self.manifest = path, manifest

    def update(self, **facts: Any) -> None:
        self.manifest.update(facts)

    def _nothing(self, *_: Any, **__: Any) -> None:
        """Left to the process that writes the folder."""

    record = sync_metrics = cut_metrics = log = discard = close = _nothing


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a run. Raises `CheckpointError` if `path` is not one."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is not a run: it has no {MANIFEST}") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / MANIFEST} cannot be read: {error}") from error
    if not isinstance(manifest, dict):
        raise CheckpointError(f"{path} is not a run: its {MANIFEST} is not an object")
    return manifest


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
    return manifest


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl with a kind and a step; lines that a kill cut short or a disk garbled are left out."""
    lines = []
    file = path / METRICS
    for text in file.read_bytes().splitlines() if file.exists() else []:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int) and "kind" in line:
            lines.append(line)
    return lines


def summary(path: Path) -> dict[str, Any]:
    """The figures of a run: held-out bits per byte (last), mean loss of the last 100 steps, median tok/s, peak memory."""
    lines = read_metrics(path)
    steps = [line for line in lines if line["kind"] == "step"]
    evaluations = [line for line in lines if line["kind"] == "evaluation"]
    figures: dict[str, Any] = {}
    if evaluations:
        figures["bits_per_byte"] = evaluations[-1]["bits_per_byte"]
        figures["evaluated_at"] = evaluations[-1]["step"]
    if steps:
        figures["loss_last_100_steps"] = statistics.fmean(line["loss"] for line in steps[-100:])
        figures["tok_s"] = statistics.median(line["tok_s"] for line in steps[len(steps) // 10 :])
        figures["peak_memory"] = max(line["memory"] for line in steps)
        figures["bytes_seen"] = steps[-1]["bytes_seen"]
    return figures


def _lock(path: Path) -> int:
    with storage_errors(f"cannot write {path}"):
        descriptor = os.open(path / ".lock", os.O_RDWR | os.O_CREAT)
    if fcntl is None:
        return descriptor
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise ConfigError(f"{path} is in use: another process is training in it") from error
    return descriptor


def now() -> str:
    """The time in UTC, ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def hardware(device: torch.device) -> dict[str, Any]:
    """The machine and device of a run."""
    facts: dict[str, Any] = {
        "host": platform.node(),
        "system": platform.platform(),
        "cpu_threads": torch.get_num_threads(),
        "device": str(device),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "gpu": properties.name,
            "gpu_memory": properties.total_memory,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
        }
    return facts


def git_commit(folder: Path) -> str | None:
    """The commit of the git working tree around `folder`, with "+changes" if there are any; None outside a tree."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
        return done.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def memory_in_use(device: torch.device) -> int:
    """Peak bytes allocated on a GPU; resident bytes of this process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def versions(requirements: Mapping[str, str]) -> dict[str, str]:
    """Versions of the core, the plugins and the libraries that compute. `requirements`: by variant, `name==version`."""
    from importlib import metadata

    from elman_core import __version__

    libraries = {
        name: metadata.version(name) for name in ("torch", "transformers", "safetensors", "numpy", "schedulefree")
    }
    return {"elman-core": __version__, **dict(r.split("==", 1) for r in requirements.values()), **libraries}
