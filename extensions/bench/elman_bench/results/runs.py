"""Runs and suites on the disk, and the status of each. Reads only, and needs no torch.

A run is a folder with manifest.json. A suite is a folder with suite.json; the runs of its jobs are in runs/<id>, their states
in jobs/<id>.json. A path may be a run, a suite, or a folder that holds some.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from elman_bench.jobs.locks import is_locked
from elman_core.extension import METRICS, CheckpointError, ConfigError, Metrics, read_json, read_metrics

MANIFEST, SUITE = "manifest.json", "suite.json"
UNFINISHED = ("starting", "running")
ENDED_WELL = ("ok", "contended")
SILENT = 600.0
"""Seconds without a step after which a run on another machine counts as ended."""
_DEEPEST = 6  # folders below a path in which runs are looked for


@dataclass(frozen=True)
class Suite:
    """A suite's folder: `facts` is suite.json."""

    path: Path
    facts: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.facts.get("name") or self.path.name)

    @property
    def jobs(self) -> list[Mapping[str, Any]]:
        listed = self.facts.get("jobs")
        jobs = [j for j in listed if isinstance(j, dict) and j.get("id")] if isinstance(listed, list) else []
        return [_checked(job, _JOB)[0] for job in jobs]

    @cached_property
    def trials(self) -> frozenset[str]:
        """The ids of the jobs that are trials: also of values that a later version of the suite added or left out."""
        jobs = self.jobs
        listed = {str(id) for job in jobs for id in job.get("trials") or ()}
        return frozenset(listed | {str(job["id"]) for job in jobs if str(job["id"]).endswith("-trial")})


@dataclass(frozen=True)
class Run:
    """A run, or a job of a suite that has not started.

    Attributes:
        path: the run's folder. manifest: the content of manifest.json; empty if missing or unreadable.
        suite, job, state: its suite, its entry in suite.json, and jobs/<id>.json; None and empty outside of a suite.
        fault: why the manifest could not be read.
    """

    path: Path
    manifest: Mapping[str, Any] = field(default_factory=dict)
    suite: Suite | None = None
    job: Mapping[str, Any] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    fault: str = ""

    @cached_property
    def metrics(self) -> Metrics:
        """The content of metrics.jsonl, read once."""
        return read_metrics(self.path, str(self.manifest.get("id", "")))

    @cached_property
    def settings(self) -> dict[str, dict[str, Any]]:
        """The tree of settings; for a job that has not started, those in the suite."""
        tree = self.manifest.get("settings") or self.job.get("settings") or {}
        found = {table: tree.get(table) for table in ("model", "data", "train")}
        return {table: dict(values) if isinstance(values, Mapping) else {} for table, values in found.items()}

    @property
    def seed(self) -> int | None:
        seed = self.settings["train"].get("seed", self.job.get("seed"))
        return seed if isinstance(seed, int) else None

    @property
    def is_trial(self) -> bool:
        """Whether it is a trial, which chooses a value for other runs of its suite."""
        return self.suite is not None and str(self.job.get("id")) in self.suite.trials

    @cached_property
    def standing(self) -> tuple[str, str]:
        """(status, remark). See `status_of`."""
        return status_of(self)

    @property
    def status(self) -> str:
        return self.standing[0]

    @property
    def ok(self) -> bool:
        return self.status == "ok"


def without_trials(runs: Sequence[Run]) -> Sequence[Run]:
    """The runs without trials, which are shorter and have another protocol; all runs if all are trials."""
    return [run for run in runs if not run.is_trial] or runs


def find_runs(paths: Iterable[Path]) -> list[Run]:
    """Every run below the paths, each once, in the order of the paths and then by name.

    Raises:
        ConfigError: a path does not exist, or has no run below it.
    """
    found: dict[Path, Run] = {}
    for path in paths:
        if not path.exists():
            raise ConfigError(f"{path} does not exist: give runs, suites or folders of them")
        count = 0
        for run in _below(path, _DEEPEST):
            found.setdefault(run.path.resolve(), run)
            count += 1
        if not count:
            raise ConfigError(f"there is no run in {path}: a run is a folder with {MANIFEST}, a suite one with {SUITE}")
    return list(found.values())


def _below(path: Path, depth: int) -> Iterator[Run]:
    if (path / SUITE).is_file():
        yield from read_suite(path)[1]
    elif (path / MANIFEST).is_file():
        yield read_run(path, *_suite_around(path))
    elif depth and path.is_dir():
        with os.scandir(path) as entries:
            folders = sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))
        for name in folders:
            yield from _below(path / name, depth - 1)


def read_suite(path: Path) -> tuple[Suite, list[Run]]:
    """A suite and the runs of all its jobs, started or not. Raises `ConfigError` if suite.json cannot be read."""
    facts, fault = _read_json(path / SUITE)
    if fault:
        raise ConfigError(f"{path} is not a suite: {fault}")
    suite = Suite(path, facts)
    return suite, [read_run(path / "runs" / str(job["id"]), suite, job) for job in suite.jobs]


def _suite_around(path: Path) -> tuple[Suite | None, Mapping[str, Any]]:
    """The suite around a run's folder, and the run's job there."""
    home = path.resolve().parent.parent
    if path.resolve().parent.name != "runs" or not (home / SUITE).is_file():
        return None, {}
    facts, fault = _read_json(home / SUITE)
    if fault:
        return None, {}
    suite = Suite(home, facts)
    return suite, next((j for j in suite.jobs if str(j["id"]) == path.resolve().name), {})


def read_run(path: Path, suite: Suite | None = None, job: Mapping[str, Any] | None = None) -> Run:
    """One run. Missing or damaged parts stay empty and are named in `fault`."""
    manifest, fault = _read_json(path / MANIFEST)
    manifest, wrong = _checked(manifest, _MANIFEST)
    state: dict[str, Any] = {}
    if suite is not None and job:
        state = _checked(_read_json(suite.path / "jobs" / f"{job['id']}.json")[0], _STATE)[0]
        state["attempts"] = [a for a in state.get("attempts", []) if isinstance(a, dict)]
    if not fault and not manifest.get("status"):
        fault = f"its {MANIFEST} has no status: it is damaged, or another file's"
    if wrong:
        fault = f"{MANIFEST} has values of a wrong type: {', '.join(wrong)}"
    return Run(path, manifest, suite, job or {}, state, fault)


# The types of entries; entries of another type are dropped.
_MANIFEST: dict[str, Any] = {
    "status": str, "settings": dict, "protocol": dict, "parameters": int, "hardware": dict, "versions": dict, "result": dict,
    "act_hooks": dict, "kernels": dict, "backends": list, "error": str, "ended": str, "git_commit": str,
    "asked": dict,
}  # fmt: skip
_JOB: dict[str, Any] = {"model": str, "settings": dict, "tuned": dict, "parameters": int, "target": str, "seed": int}
_STATE: dict[str, Any] = {"status": str, "attempts": list}


def _checked(facts: dict[str, Any], kinds: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """(facts without entries of a wrong type or None, the names of the wrong ones)."""
    wrong = [k for k, kind in kinds.items() if facts.get(k) is not None and not isinstance(facts[k], kind)]
    return {k: v for k, v in facts.items() if k not in wrong and not (v is None and k in kinds)}, wrong


def _read_json(path: Path) -> tuple[dict[str, Any], str]:
    """(object, what is wrong with it)."""
    try:
        return read_json(path), ""
    except FileNotFoundError:
        return {}, f"it has no {path.name}"
    except CheckpointError as error:
        return {}, str(error)


def status_of(run: Run) -> tuple[str, str]:
    """The status of a run, and a remark if the status alone would mislead.

    The manifest decides. If its process was killed it says "running" forever: then no process holds the run's lock, and the
    status is that of the job, or "killed". A job's "timeout" replaces the "killed" that it caused, and a run that shared its
    GPU is "contended" even if it ended well.
    """
    said = str(run.manifest.get("status") or "")
    job = str(run.state.get("status") or "")
    if not said:
        # a job that ended well had a run, which was deleted
        if run.fault and (job == "ok" or (run.path / METRICS).exists() or (run.path / MANIFEST).exists()):
            return ("incomplete" if job in ("", "ok") else job), run.fault
        return job or "waiting", ""
    if said in UNFINISHED:
        gone = _gone(run)
        if not gone:
            return "running", ""
        return (job if job not in ("", "ok", "running", "waiting", "lost") else "killed"), gone
    if job == "timeout" and said != "ok":
        return job, ""
    if said == "ok" and run.state.get("contended"):
        return "contended", "its GPU was shared"
    return said, str(run.manifest.get("error") or "")


def _gone(run: Run) -> str:
    """Why a run with status "running" does not run; empty if it does."""
    lock = run.path / ".lock"
    with contextlib.suppress(OSError):  # another user's run
        if is_locked(lock):
            return ""
    host = (run.manifest.get("hardware") or {}).get("host")
    here = host in (None, platform.node())
    if here and os.name == "posix" and os.access(lock, os.R_OK):
        return "its process is gone; elman resume continues it"
    files = [p.stat().st_mtime for p in (run.path / METRICS, run.path / MANIFEST) if p.exists()]
    silent = time.time() - max(files, default=0.0)
    return "" if silent < SILENT else f"no step for {silent / 60:,.0f} minutes" + ("" if here else f" (on {host})")
