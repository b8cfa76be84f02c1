"""Notes below a table: differences that the hash of a protocol does not cover, and what went wrong."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .identity import label, spelled
from .runs import Run

if TYPE_CHECKING:
    from .rows import Row

TOLERANCE = 0.02
"""Relative difference in parameters up to which models count as equal in size."""


def notes(runs: Sequence[Run], rows: Sequence[Row]) -> list[str]:
    """The notes of one group."""
    begun = [run for run in runs if run.manifest]
    found = []
    places = {hardware(run) for run in begun if run.manifest.get("hardware")}
    if len(places) > 1:
        found.append(f"on different hardware ({'; '.join(sorted(places))}): tok/s and memory do not compare")
        if any(run.settings["train"].get("minutes") for run in begun):
            found.append("the length was given in minutes, so the losses do not compare either")
    hooks = {json.dumps(run.manifest.get("act_hooks") or {}, sort_keys=True) for run in begun}
    if len(hooks) > 1:
        found.append("plugins' hooks changed some of the trainings (act_hooks in the manifests)")
    sizes = [int(run.manifest["parameters"]) for run in begun if run.manifest.get("parameters")]
    if sizes and max(sizes) > min(sizes) * (1 + 2 * TOLERANCE):
        found.append(f"sizes from {min(sizes):,} to {max(sizes):,} parameters: not models of equal size")
    broken = [run.path.name for run in begun if "metrics" in run.__dict__ and run.metrics.broken]
    if broken:
        found.append(f"broken lines of metrics.jsonl were left out: {', '.join(broken)}")
    found += _kernels(begun)
    for run in runs:
        if run.standing[1] and run.standing[0] != "contended":
            remark = textwrap.shorten(run.standing[1], 200, placeholder="…")
            found.append(f"{run.path.name}: {run.standing[0]}: {remark}")
    return found + _edges(rows)


def _kernels(runs: Sequence[Run]) -> list[str]:
    """GPU runs without a kernel, and kernels that were not verified."""
    plain: dict[str, None] = {}
    unverified: dict[str, None] = {}
    for run in runs:
        backends = [str(b) for b in run.manifest.get("backends") or []]
        on_gpu = str((run.manifest.get("hardware") or {}).get("device")).startswith("cuda")
        if on_gpu and any(re.search(r": (torch|reference)", b) for b in backends):
            plain[f"{label(run)} ({'; '.join(backends)})"] = None
        kernels = run.manifest.get("kernels") or {}
        if any(isinstance(use, dict) and use.get("skipped") for use in kernels.values()):
            unverified[run.path.name] = None
    found = [f"on the GPU as plain PyTorch, without a kernel: {', '.join(plain)}"] if plain else []
    return found + ([f"kernels were not verified (ELMAN_VERIFY=skip): {', '.join(unverified)}"] if unverified else [])


def hardware(run: Run) -> str:
    """The hardware of a run in a few words."""
    facts = run.manifest.get("hardware") or {}
    if facts.get("gpu"):
        return str(facts["gpu"])
    threads = facts.get("cpu_threads", "?")
    return f"{facts.get('device', 'unknown')}, {threads} thread{'' if threads == 1 else 's'}, {facts.get('host', '?')}"


def _edges(rows: Sequence[Row]) -> list[str]:
    """Tuned settings whose best value is the smallest or largest that was tried: a better value may lie beyond."""
    found = []
    for row in rows:
        for key, tried in row.tried.items():
            best = row.tuned.get(key)
            numbers = [v for v in tried if isinstance(v, int | float) and not isinstance(v, bool)]
            if row.chosen and row.status == "ok" and len(numbers) == len(tried) and best in (numbers[0], numbers[-1]):
                end = "smallest" if best == numbers[0] else "largest"
                name = row.runs[0].job.get("model", row.model)
                found.append(f"{name}: the best {key}, {spelled(best)}, is the {end} value tried: try values beyond it")
    return list(dict.fromkeys(found))
