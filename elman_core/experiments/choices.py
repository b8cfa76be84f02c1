"""Rows that belong together: values of a tuned setting, of which the best is chosen, and seeds, of which the mean is taken."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .names import identity
from .rows import Figure, Row
from .runs import Run


def tuned_of(run: Run) -> dict[str, Any]:
    """What a suite says was tuned, with the run's value; of a run by itself, the learning rate."""
    said = run.job.get("tuned") or {}
    rate = run.settings["train"].get("lr")
    return {k if "." in k else f"train.{k}": v for k, v in said.items()} or ({} if rate is None else {"train.lr": rate})


def with_choices(rows: Sequence[Row]) -> list[Row]:
    """Each row with the values tried of what was tuned, and whether its own were chosen: the lowest bits per byte, averaged
    over the seeds; the loss of the last 100 steps where nothing is held out."""
    families: dict[tuple[str, ...], list[int]] = {}
    for i, row in enumerate(rows):
        families.setdefault(_family(row), []).append(i)
    result = list(rows)
    for members in families.values():
        keys = {k for i in members for k in rows[i].tuned}
        values: dict[str, list[Any]] = {k: [] for k in keys}
        for i in members:
            for k, v in rows[i].tuned.items():
                if v not in values[k]:
                    values[k].append(v)
        tried = {k: tuple(sorted(v, key=_sortable)) for k, v in values.items() if len(v) > 1}
        best = _best([rows[i] for i in members])
        for i in members:
            own = _spelled_tuned(rows[i])
            result[i] = replace(rows[i], tried=tried, chosen=not tried or best is None or own == best)
    return result


def _family(row: Row) -> tuple[str, ...]:
    """What rows share that differ in a tuned setting or the seed alone. Only a suite says what was tuned."""
    run = row.runs[0]
    if not run.job.get("tuned"):
        return (str(run.path),)
    keys = tuple(f"{k}=" for k in row.tuned)
    return (str(run.job.get("model")), *(part for part in identity(run) if not part.startswith(keys)))


def _spelled_tuned(row: Row) -> str:
    return json.dumps(row.tuned, sort_keys=True, default=str)


def _best(rows: Sequence[Row]) -> str | None:
    """The tuned values with the lowest mean; those with more finished seeds first. None if no run has ended well."""
    scores: dict[str, list[float]] = {}
    for row in rows:
        value = row.value("bits_per_byte")
        value = row.value("last_100") if math.isnan(value) else value
        if row.status in ("ok", "contended") and not math.isnan(value):
            scores.setdefault(_spelled_tuned(row), []).append(value)
    if not scores:
        return None
    return min(scores, key=lambda k: (-len(scores[k]), statistics.fmean(scores[k])))


def _sortable(value: Any) -> tuple[int, float, str]:
    return (0, float(value), "") if isinstance(value, int | float) else (1, 0.0, str(value))


# seeds ---------------------------------------------------------------------------------------------------------------


def merge_seeds(rows: Sequence[Row]) -> list[Row]:
    """One row for the seeds of a model: means and standard deviations of those that ended well, and how many there are."""
    same: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        same.setdefault(identity(row.runs[0]), []).append(row)
    return [_merged(members) for members in same.values()]


def _merged(rows: Sequence[Row]) -> Row:
    good = [row for row in rows if row.status == "ok"]
    counted = good or list(rows)
    figures = {}
    for name in {name for row in counted for name in row.figures}:
        values = [row.figures[name].value for row in counted if name in row.figures]
        spread = statistics.stdev(values) if len(values) > 1 else None
        figures[name] = Figure(statistics.fmean(values), spread, len(values))
    bad = [f"{row.status}" + (f" (seed {row.seeds[0]})" if row.seeds else "") for row in rows if row.status != "ok"]
    remark = f"left out: {', '.join(bad)}" if good and bad else ", ".join(bad)
    status = "ok" if good else rows[0].status
    return replace(
        rows[0],
        runs=tuple(run for row in rows for run in row.runs),
        figures=figures,
        status=status,
        remark=remark if len(rows) > 1 else rows[0].remark,
        seeds=tuple(seed for row in counted for seed in row.seeds),
        chosen=any(row.chosen for row in rows),
    )
