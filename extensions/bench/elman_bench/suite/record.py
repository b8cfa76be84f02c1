"""The finished runs of a suite in one small file, from which the suite continues without its folder. Needs no torch.

The file has what tables, pictures and the choice among trials need: of each run its entry in suite.json, its state, manifest
and logs, and up to `POINTS` steps of its metrics, with six digits. It has no weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from elman_bench.jobs.job import ID, State
from elman_bench.jobs.locks import fcntl
from elman_bench.results.runs import MANIFEST, read_run
from elman_core.extension import (
    METRICS,
    CheckpointError,
    StorageError,
    log_line,
    now,
    printable,
    read_bytes,
    read_json,
    read_metrics,
    storage_errors,
    write_json,
    write_text,
)

from .folder import SUITE, read_listed

POINTS = 100
"""Most steps of each run that are kept: multiples of a power of two, so that runs of any length share some; and the last."""
HINT = "; move it away to begin anew, or give another --results"
CURVE = ("step", "loss", "seconds", "bytes_seen")


class Record:
    """The file of a suite's finished runs, which need not exist, and the folder of the suite.

    Raises:
        CheckpointError: the file is damaged, or is another file.
    """

    def __init__(self, file: Path, folder: Path) -> None:
        self.file, self.folder = file, folder
        self.runs = self._read()

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            tree = read_json(self.file) if self.file.exists() else {}
        except CheckpointError as error:
            raise CheckpointError(f"{error}{HINT}") from error
        runs = tree.get("runs", {})
        if not isinstance(runs, dict) or tree.get("format", 1) != 1:
            raise CheckpointError(f"{self.file} is no file of finished runs of this version{HINT}")
        parts = {"job": dict, "state": dict, "manifest": dict, "logs": dict, "curve": dict, "evaluations": list}
        for id, run in runs.items():
            whole = isinstance(run, dict) and all(isinstance(run.get(k), kind) for k, kind in parts.items())
            own = whole and run["job"].get("id") == run["state"].get("id") == id and "settings" in run["job"]
            own = own and isinstance(run["state"].get("attempts"), list)
            if not own or not all(map(ID.fullmatch, (id, *run["logs"]))):  # they become names of files
                raise self._damaged(id)
        return runs

    def _damaged(self, id: str) -> CheckpointError:
        return CheckpointError(f"{self.file} holds no finished run of a suite as {printable(id)}{HINT}")

    def restore(self) -> None:
        """Write the runs of the file into the folder, without those that it has, in whatever state. Raises `StorageError` and,
        for a run that is damaged, `CheckpointError`."""
        suite = read_listed(self.folder / SUITE) or {"format": 1, "created": now(), "jobs": []}
        lacking = {id: kept for id, kept in self.runs.items() if not self._has(id, kept)}
        files = {id: self._files(id, kept) for id, kept in lacking.items()}
        jobs = {job["id"]: job for job in suite["jobs"]} | {id: kept["job"] for id, kept in lacking.items()}
        write_json(self.folder / SUITE, {**suite, "jobs": list(jobs.values())})
        for id, kept in lacking.items():
            run, state = self.folder / "runs" / id, self.folder / "jobs" / f"{id}.json"
            if kept["manifest"]:
                run.mkdir(parents=True, exist_ok=True)
                for name, text in files[id].items():
                    write_text(run / name, text)
                write_json(run / MANIFEST, kept["manifest"])
            state.parent.mkdir(parents=True, exist_ok=True)
            write_json(state, kept["state"])  # last: without it, a kill came before, and all is written again

    def _has(self, id: str, kept: dict[str, Any]) -> bool:
        """Whether the folder has a run of this name: its state, or the manifest of another training."""
        own = kept["manifest"].get("id")
        here = read_run(self.folder / "runs" / id).manifest.get("id", own)
        return here != own or (self.folder / "jobs" / f"{id}.json").exists()

    def _files(self, id: str, kept: dict[str, Any]) -> dict[str, str]:
        """The logs of a run of the file, by name. Raises `CheckpointError`."""
        if not kept["manifest"]:
            return {}
        try:
            return _logs(kept)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._damaged(id) from error

    def add(self, states: Sequence[State]) -> None:
        """Write the file again if a run has ended since. Raises `StorageError`."""
        new = {state.id: state for state in states if not state.unfinished and self._lacks(state)}
        if not new:
            return
        jobs = {job["id"]: job for job in read_listed(self.folder / SUITE)["jobs"]}
        ended = {
            id: {"job": jobs[id], "state": dataclasses.asdict(state), **_content(self.folder / "runs" / id)}
            for id, state in new.items()
        }
        with storage_errors(f"cannot make {self.file.parent}"):
            self.file.parent.mkdir(parents=True, exist_ok=True)
        with _alone(self.file.parent):
            self.runs |= self._read() | ended  # another suite may have added some since
            try:
                write_json(self.file, {"format": 1, "runs": self.runs})
            except StorageError as error:
                how = f"the same command without --results goes on in {self.folder}"
                raise StorageError(f"{error}; no run is lost: {how}") from error

    def _lacks(self, state: State) -> bool:
        """Whether the file has not this end of a run: it is asked of all runs several times a second."""
        kept = self.runs.get(state.id, {}).get("state", {})
        return (kept.get("status"), len(kept.get("attempts", ()))) != (state.status, len(state.attempts))


def _logs(kept: dict[str, Any]) -> dict[str, str]:
    """The logs of a run of the file, by name."""
    columns = {k: map(float, values.split()) for k, values in kept["curve"].items()}
    steps = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    lines = [{"kind": "step", **step, "step": int(step["step"])} for step in steps] + kept["evaluations"]
    metrics = [log_line(line, kept["manifest"].get("id", "")) for line in lines]
    return {name: "".join(text + "\n" for text in texts) for name, texts in {**kept["logs"], METRICS: metrics}.items()}


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keeps other suites from writing their runs into a file of this folder, where the file system has such locks."""
    with storage_errors(f"cannot open {folder}"):
        descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            if fcntl is not None:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _content(run: Path) -> dict[str, Any]:
    """The manifest of a run, some steps and all evaluations of its metrics, and the lines of its other logs."""
    manifest = read_json(run / MANIFEST) if (run / MANIFEST).exists() else {}
    metrics = read_metrics(run, manifest.get("id", ""))
    steps, each = metrics.columns["step"], 1
    while len(steps) > POINTS * each:
        each *= 2
    chosen = [i for i, step in enumerate(steps) if step % each == 0 or i == len(steps) - 1]
    logs = [path for path in sorted(run.glob("*.jsonl")) if path.name != METRICS]
    return {
        "manifest": manifest,
        "curve": {k: " ".join(f"{metrics.columns[k][i]:.6g}" for i in chosen) for k in CURVE},
        "evaluations": list(metrics.evaluations),
        "logs": {path.name: read_bytes(path).decode().splitlines() for path in logs},
    }
