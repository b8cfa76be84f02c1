"""The folder of a suite or of a list of commands: its jobs, their states, runs and logs, and the values that trials choose.

Trials are short runs that decide which value of a tuned setting is best. Needs no torch.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elman_bench.jobs.job import PYTHON, Job, read_state
from elman_bench.jobs.locks import Lock, holder, is_locked, lock_soon
from elman_bench.jobs.outcome import ELMAN
from elman_bench.results.identity import flatten
from elman_bench.results.runs import read_run
from elman_core.extension import (
    RESUMABLE,
    TUNABLE,
    CheckpointError,
    ConfigError,
    Settings,
    apply_sets,
    from_dict,
    now,
    put,
    read_json,
    require_text,
    storage_errors,
    write_json,
    write_text,
)

from .plan import Plan
from .spec import Suite

SUITE, JOBS = "suite.json", "jobs.json"
SCORES = ("bits_per_byte", "loss_last_100_steps")
"""The results that decide, lowest best: held-out bits per byte, or the last losses if nothing is held out."""


class Folder:
    """A folder, locked for one scheduler.

    Raises:
        ConfigError: another scheduler works on it. StorageError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        require_text(path)
        with storage_errors(f"cannot make {path}"):
            path.mkdir(parents=True, exist_ok=True)
        try:
            self._lock: Lock = lock_soon(path / ".scheduler.lock")
        except BlockingIOError as error:
            who = holder(path / ".scheduler.lock")
            raise ConfigError(
                f"{path} is in use by another scheduler ({who}); elman jobs status {path} shows its jobs"
            ) from error
        self._lock.write(f"pid {os.getpid()}\n")

    def close(self) -> None:
        self._lock.close()

    def suite(self, suite: Suite, plan: Plan, timeout: float | None, env: Mapping[str, str]) -> list[Job]:
        """Write suite.json and the recipes; return the jobs. Runs that the folder already has stay in it.

        Raises:
            ConfigError: the folder has a run of the same name with other settings, or holds commands.
        """
        path = self.path
        self._holds_no(JOBS, "commands")
        known = read_listed(path / SUITE)
        jobs = {job["id"]: job for job in known.get("jobs", [])}
        require_equal(path, jobs, plan)
        states = {id: read_state(path / "jobs" / f"{id}.json", id) for id in jobs}
        # Values that trials have chosen stay, too.
        done = {id for id, state in states.items() if state.ok or (jobs[id].get("chosen") and state.attempts)}
        jobs |= {job.id: job.to_dict() for job in plan.jobs if job.id not in done}
        facts = {
            "format": 1,
            "name": suite.name,
            "summary": suite.summary,
            "created": known.get("created", now()),
            "skipped": [vars(skipped) for skipped in plan.skipped],
            "jobs": list(jobs.values()),
        }
        write_json(path / SUITE, facts)
        write_text(path / "suite.toml", suite.text)
        with storage_errors(f"cannot write {path}"):
            for name in ("jobs", "logs", "runs"):
                (path / name).mkdir(exist_ok=True)
        made = []
        for planned in plan.jobs:
            file, run = path / "jobs" / f"{planned.id}.toml", path / "runs" / planned.id
            if planned.id not in done:
                write_text(file, recipe(planned.settings))
            command = (*_launcher(suite.gpus), "train", str(file), "--out", str(run))
            job = _job(path, planned.id, command, run, timeout, suite.gpus, env)
            if planned.trials:
                prepare = functools.partial(settle, path, planned.id)
                job = dataclasses.replace(job, after=planned.trials, prepare=prepare)
            made.append(job)
        return made

    def commands(self, commands: Mapping[str, Sequence[str]], timeout: float | None, gpus: int) -> list[Job]:
        """Write jobs.json; return the jobs. `commands`: by name.

        Raises:
            ConfigError: the folder has another command of the same name, or holds a suite.
        """
        self._holds_no(SUITE, "a suite")
        known = {job["id"]: job["command"] for job in read_listed(self.path / JOBS).get("jobs", [])}
        for id, command in commands.items():
            if id in known and known[id] != list(command):
                raise ConfigError(
                    f"{self.path} has another command {id}: {' '.join(known[id])!r} there, {' '.join(command)!r} now; choose "
                    f"another --out, or add new commands at the end of the list"
                )
        known |= {id: list(command) for id, command in commands.items()}
        write_json(self.path / JOBS, {"format": 1, "jobs": [{"id": id, "command": c} for id, c in known.items()]})
        return [_job(self.path, id, tuple(c), None, timeout, gpus) for id, c in commands.items()]

    def _holds_no(self, file: str, of: str) -> None:
        if (self.path / file).exists():
            raise ConfigError(
                f"{self.path} is the folder of {of}, which would hide what is added: choose another --out"
            )


def known_jobs(path: Path) -> list[Job]:
    """The jobs of a folder, to show or cancel them. Raises `ConfigError` if it is not a folder of jobs."""
    facts = read_listed(path / SUITE) or read_listed(path / JOBS)
    if not facts:
        raise ConfigError(f"{path} holds no jobs: it has no {SUITE} and no {JOBS}")
    runs = {job["id"]: path / "runs" / job["id"] for job in facts["jobs"] if "settings" in job}
    return [
        _job(path, job["id"], tuple(job.get("command", ["elman"])), runs.get(job["id"]), None) for job in facts["jobs"]
    ]


def is_held(path: Path) -> bool:
    """Whether a scheduler works on a folder now."""
    return is_locked(path / ".scheduler.lock")


def _launcher(gpus: int) -> tuple[str, ...]:
    """The command `elman`, in one process per GPU."""
    if gpus == 1:
        return ELMAN
    several = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}", "--no-python")
    return (*PYTHON, *several, *ELMAN)


def _job(
    path: Path,
    id: str,
    command: tuple[str, ...],
    run: Path | None,
    timeout: float | None,
    gpus: int = 1,
    env: Mapping[str, str] | None = None,
) -> Job:
    return Job(id, command, run, path / "logs" / f"{id}.log", path / "jobs" / f"{id}.json", timeout, gpus, env or {})


def require_equal(path: Path, known: Mapping[str, Mapping[str, Any]], plan: Plan) -> None:
    """Raise `ConfigError` if a run of the folder or file has other settings than those that a resume may change."""
    for job in plan.jobs:
        if job.id not in known:
            continue
        before = flatten(from_dict(known[job.id]["settings"]).to_dict())
        after = flatten(job.settings.to_dict())
        by_trials = {key for key in TUNABLE if job.trials}
        keys = sorted({*before, *after} - set(RESUMABLE) - by_trials)
        changed = [key for key in keys if before.get(key) != after.get(key)]
        if changed:
            said = ", ".join(f"{key} was {before.get(key)!r} and is {after.get(key)!r}" for key in changed[:3])
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            raise ConfigError(
                f"{path} holds this suite with other settings ({said}{more}): choose another --out and --results, or use the "
                "old settings"
            )


def read_listed(path: Path) -> dict[str, Any]:
    """suite.json or jobs.json, or {} if missing. Raises `CheckpointError` if it is damaged."""
    try:
        tree = read_json(path)
    except FileNotFoundError:
        return {}
    jobs = tree.get("jobs")
    if not isinstance(jobs, list) or not all(_is_job(job, of_suite=path.name == SUITE) for job in jobs):
        raise CheckpointError(f"{path} is not a list of jobs: remove it, then run the same command to make it again")
    return tree


def _is_job(job: Any, of_suite: bool) -> bool:
    if not isinstance(job, dict) or not isinstance(job.get("id"), str):
        return False
    words = job.get("command", [])
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        return False
    return isinstance(job.get("settings"), dict) if of_suite else bool(words)


def best(folder: Path, trials: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The tuned values of the best trial.

    Args:
        trials: their entries in suite.json; trials that did not end well are ignored.

    Raises:
        ConfigError: no trial ended well, or those that did have no result in common.
    """
    found = [(trial, read_run(folder / "runs" / trial["id"]).manifest) for trial in trials]
    well = [(trial, dict(m.get("result") or {})) for trial, m in found if m.get("status") == "ok"]
    if not well:
        names = ", ".join(str(trial["id"]) for trial in trials)
        raise ConfigError(f"no trial ended well, so there is no value to train with: {names}")
    key = next((k for k in SCORES if all(k in result for _, result in well)), None)
    if key is None:
        damaged = [str(t["id"]) for t, result in well if result.get("lacking_steps")]
        hint = f"; steps of {', '.join(damaged)} were lost: delete these runs, then start again" if damaged else ""
        raise ConfigError(f"the trials {', '.join(str(t['id']) for t, _ in well)} have no result in common{hint}")
    return dict(min(well, key=lambda pair: float(pair[1][key]))[0]["tuned"])


def settle(folder: Path, job: str) -> None:
    """Write the values of the best trial into a run's recipe and its entry of suite.json, once.

    Raises:
        ConfigError: as `best`. StorageError.
    """
    facts = read_listed(folder / SUITE)
    entries = {entry["id"]: entry for entry in facts["jobs"]}
    entry = entries[job]
    if "chosen" in entry:
        return
    values = best(folder, [entries[trial] for trial in entry["trials"]])
    tree = apply_sets(entry["settings"], ())
    for key, value in values.items():
        put(tree, key, value)
    settings = from_dict(tree)
    entry |= {"settings": settings.to_dict(), "lr": settings.train.lr, "chosen": values}
    write_text(folder / "jobs" / f"{job}.toml", recipe(settings))
    write_json(folder / SUITE, facts)  # last: it says that the choice is made


def recipe(settings: Settings) -> str:
    """Settings as a recipe: the TOML that `elman train` reads. Undecided settings are left out."""
    lines: list[str] = []
    for table, values in settings.to_dict().items():
        lines += [f"[{table}]", *(f"{k} = {_toml(v)}" for k, v in values.items() if v is not None), ""]
    return "\n".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False)
