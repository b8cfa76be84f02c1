"""Which value of what is tuned is best, from the short runs that tried each. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elman_core.registry import ConfigError
from elman_core.storage import write_json, write_text
from elman_core.training.settings import apply_sets, from_dict, put

from .recipe import recipe

SCORES = ("bits_per_byte", "loss_last_100_steps")
"""What decides, the lowest first: held-out bits per byte, or the last losses where nothing is held out."""


def best(folder: Path, trials: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the best of a suite's trials had tuned.

    Args:
        trials: their entries in suite.json. One that did not end well has no say.

    Raises:
        ConfigError: none of them ended well, or they were not scored alike.
    """
    found = [(trial, _result(folder, trial["id"])) for trial in trials]
    well = [(trial, result) for trial, result in found if result]
    if not well:
        names = ", ".join(str(trial["id"]) for trial in trials)
        raise ConfigError(f"no trial ended well, so that there is no value to go on with: {names}")
    key = next((k for k in SCORES if all(k in result for _, result in well)), None)
    if key is None:
        raise ConfigError(f"the trials {', '.join(str(t['id']) for t, _ in well)} were not scored")
    scored = [(float(result[key]), dict(trial["tuned"])) for trial, result in well]
    return min(scored, key=lambda pair: pair[0])[1]


def settle(folder: Path, job: str) -> None:
    """Give a run of a suite the values of its best trial: in its recipe, and in its entry of suite.json. They stay.

    Raises:
        ConfigError: as `best`. StorageError.
    """
    facts = json.loads((folder / "suite.json").read_text(encoding="utf-8"))
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
    write_json(folder / "suite.json", facts)
    write_text(folder / "jobs" / f"{job}.toml", recipe(settings))


def _result(folder: Path, id: str) -> dict[str, Any]:
    """The figures of a run that ended well, or nothing."""
    try:
        manifest = json.loads((folder / "runs" / id / "manifest.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return dict(manifest.get("result") or {}) if manifest.get("status") == "ok" else {}
