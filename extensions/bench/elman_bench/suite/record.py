"""The finished runs of a suite in one small file, from which the suite continues without its folder. Needs no torch.

The file has what tables, pictures and the choice among trials need: of each run its entry in suite.json, its state, manifest
and logs, and up to `POINTS` steps of its metrics, with six digits. It has no weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elman_bench.jobs.job import ID, State
from elman_bench.results.runs import MANIFEST
from elman_core.extension import (
    METRICS,
    CheckpointError,
    log_line,
    now,
    read_bytes,
    read_json,
    read_metrics,
    write_json,
    write_text,
)

from .folder import SUITE, read_listed

POINTS = 100
"""Most steps of each run that are kept: multiples of a power of two, so that runs of any length share some; and the last."""
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
        runs: dict[str, dict[str, Any]] = read_json(self.file).get("runs", {}) if self.file.exists() else {}
        parts = {"job": dict, "state": dict, "manifest": dict, "logs": dict, "curve": dict, "evaluations": list}
        for id, run in runs.items():
            whole = isinstance(run, dict) and all(isinstance(run.get(k), kind) for k, kind in parts.items())
            if not whole or not all(map(ID.fullmatch, (id, *run["logs"]))):  # they become names of files
                raise CheckpointError(f"{self.file} holds no finished run of a suite as {id}")
        return runs

    def restore(self) -> None:
        """Write the runs of the file into the folder, without those that it has, in whatever state. Raises `StorageError`."""
        suite = read_listed(self.folder / SUITE) or {"format": 1, "created": now(), "jobs": []}
        jobs = {job["id"]: job for job in suite["jobs"]}
        for id, kept in self.runs.items():
            run, state = self.folder / "runs" / id, self.folder / "jobs" / f"{id}.json"
            if run.exists() or state.exists():
                continue
            if manifest := kept["manifest"]:
                run.mkdir(parents=True)
                columns = {k: map(float, values.split()) for k, values in kept["curve"].items()}
                steps = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
                lines = [{"kind": "step", **step, "step": int(step["step"])} for step in steps] + kept["evaluations"]
                metrics = [log_line(line, manifest.get("id", "")) for line in lines]
                for name, texts in {**kept["logs"], METRICS: metrics}.items():
                    write_text(run / name, "".join(f"{text}\n" for text in texts))
                write_json(run / MANIFEST, manifest)
            state.parent.mkdir(parents=True, exist_ok=True)
            write_json(state, kept["state"])
            jobs[id] = kept["job"]
        write_json(self.folder / SUITE, {**suite, "jobs": list(jobs.values())})

    def add(self, states: Sequence[State]) -> None:
        """Write the file again if a run has ended since. Raises `StorageError`."""
        facts = {state.id: dataclasses.asdict(state) for state in states if not state.unfinished}
        new = [id for id, state in facts.items() if self.runs.get(id, {}).get("state") != state]
        if not new:
            return
        jobs = {job["id"]: job for job in read_listed(self.folder / SUITE)["jobs"]}
        self.runs |= self._read()  # another suite may have added some since
        for id in new:
            self.runs[id] = {"job": jobs[id], "state": facts[id], **_content(self.folder / "runs" / id)}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.file, {"format": 1, "runs": self.runs})


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
