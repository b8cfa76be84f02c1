"""Trials: which value of a tuned setting is best, decided by short runs. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elman_core.experiments.results.runs import read_run
from elman_core.registry import ConfigError
from elman_core.storage import read_json, write_json, write_text
from elman_core.training.settings import Settings, apply_sets, from_dict, put

SCORES = ("bits_per_byte", "loss_last_100_steps")
"""The results that decide, lowest best: held-out bits per byte, or the last losses if nothing is held out."""


def best(folder: Path, trials: Sequence[Mapping[str, Any]], rank: int = 0) -> dict[str, Any]:
    """The tuned values of the best trial, or of the one of that rank.

    Args:
        trials: their entries in suite.json; trials that did not end well are ignored.

    Raises:
        ConfigError: no trial ended well, too few for this rank did, or they have no result in common.
    """
    found = [(trial, read_run(folder / "runs" / trial["id"]).manifest) for trial in trials]
    well = [(trial, dict(m.get("result") or {})) for trial, m in found if m.get("status") == "ok"]
    if not well:
        names = ", ".join(str(trial["id"]) for trial in trials)
        raise ConfigError(f"no trial ended well, so there is no value to train with: {names}")
    key = next((k for k in SCORES if all(k in result for _, result in well)), None)
    if key is None:
        raise ConfigError(f"the trials {', '.join(str(t['id']) for t, _ in well)} have no result in common")
    scored = [(float(result[key]), dict(trial["tuned"])) for trial, result in well]
    if rank >= len(scored):
        raise ConfigError(
            f"only {len(scored)} of {len(trials)} trials ended well, so no other value is left to try again"
        )
    return sorted(scored, key=lambda pair: pair[0])[rank][1]


def settle(folder: Path, job: str) -> None:
    """Write the values of the best trial into a run's recipe and its entry of suite.json, once.

    Raises:
        ConfigError: as `best`. StorageError.
    """
    facts = read_json(folder / "suite.json")
    entries = {entry["id"]: entry for entry in facts["jobs"]}
    entry = entries[job]
    if "chosen" in entry:
        return
    rank = entry.get("rank")
    values = best(folder, [entries[trial] for trial in entry["trials"]], rank or 0)
    tree = apply_sets(entry["settings"], ())
    for key, value in values.items():
        put(tree, key, value)
    settings = from_dict(tree)
    entry |= {"settings": settings.to_dict(), "lr": settings.train.lr, "chosen": values}
    if rank is not None:
        entry["tuned"] = values
    write_json(folder / "suite.json", facts)
    write_text(folder / "jobs" / f"{job}.toml", recipe(settings))


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
