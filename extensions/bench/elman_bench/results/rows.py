"""The rows of a table of results. Of the rows of a tuned setting, the best value is chosen; rows of seeds are averaged."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .identity import identity, spelled
from .runs import ENDED_WELL, Run


@dataclass(frozen=True)
class Figure:
    """A number in a row: a mean over `count` seeds, with their standard deviation if there are several."""

    value: float
    spread: float | None = None
    count: int = 1


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Figures by name, absent if unknown: `parameters`; `bits_per_byte` on the held-out text; `loss` at the number of tokens that
    all finished runs of the group saw, and `last_100`: means of 100 steps in nats per byte; `tok_s`: median after warm-up;
    `peak_memory` in bytes; `minutes` of training steps; `bytes_seen`.
    """

    model: str
    runs: tuple[Run, ...]
    figures: Mapping[str, Figure]
    status: str
    remark: str = ""
    tuned: Mapping[str, Any] = field(default_factory=dict)
    tried: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    seeds: tuple[int, ...] = ()
    chosen: bool = True

    def value(self, name: str) -> float:
        """A figure's value; nan if unknown."""
        figure = self.figures.get(name)
        return math.nan if figure is None else figure.value


@dataclass(frozen=True)
class Group:
    """Rows of one protocol, which may be ranked.

    Attributes:
        protocol, hash: of the rows. target: the size, if a suite has several. tokens: bytes that every finished run saw.
        notes: what a reader must know besides.
    """

    hash: str
    protocol: Mapping[str, Any]
    target: str | None
    rows: tuple[Row, ...]
    tokens: int | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Results:
    """All groups, and the differences of their protocols: `{key: (value in each group)}`."""

    groups: tuple[Group, ...]
    differences: Mapping[str, tuple[Any, ...]]
    hidden: int = 0
    """Rows left out because another value of a tuned setting was chosen."""


def spelled_tuned(row: Row) -> str:
    """`lr 0.001 of 3e-4, 1e-3, 3e-3`."""
    parts = []
    for key, value in row.tuned.items():
        tried = row.tried.get(key)
        listed = f" of {', '.join(spelled(v) for v in tried)}" if tried else ""
        parts.append(f"{key.rpartition('.')[2]} {spelled(value)}{listed}")
    return "; ".join(parts)


def tuned_of(run: Run) -> dict[str, Any]:
    """The tuned settings of a suite with the run's values; outside of a suite, the learning rate."""
    said = run.job.get("tuned") or {}
    rate = run.settings["train"].get("lr")
    return {k if "." in k else f"train.{k}": v for k, v in said.items()} or ({} if rate is None else {"train.lr": rate})


def with_choices(rows: Sequence[Row]) -> list[Row]:
    """Adds to each row the values that were tried, and whether its own are chosen: those with the lowest bits per byte over the
    seeds, or the lowest loss of the last 100 steps if nothing is held out."""
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
            own = _tuned_key(rows[i])
            result[i] = replace(rows[i], tried=tried, chosen=not tried or best is None or own == best)
    return result


def _family(row: Row) -> tuple[str, ...]:
    """Equal for rows that differ only in a tuned setting or the seed. Only suites have tuned settings."""
    run = row.runs[0]
    if not run.job.get("tuned"):
        return (str(run.path),)
    keys = tuple(f"{k}=" for k in row.tuned)
    return (str(run.job.get("model")), *(part for part in identity(run) if not part.startswith(keys)))


def _tuned_key(row: Row) -> str:
    return json.dumps(row.tuned, sort_keys=True, default=str)


def _best(rows: Sequence[Row]) -> str | None:
    """The tuned values with the most finished seeds, and among those the lowest mean. None if no run ended well."""
    scores: dict[str, dict[Any, float]] = {}
    for row in rows:
        value = row.value("bits_per_byte")
        value = row.value("last_100") if math.isnan(value) else value
        if row.status in ENDED_WELL and not math.isnan(value):
            scores.setdefault(_tuned_key(row), {}).setdefault(row.seeds or row.runs[0].path, value)
    if not scores:
        return None
    return min(scores, key=lambda k: (-len(scores[k]), statistics.fmean(scores[k].values())))


def _sortable(value: Any) -> tuple[int, float, str]:
    return (0, float(value), "") if isinstance(value, int | float) else (1, 0.0, str(value))


# seeds ---------------------------------------------------------------------------------------------------------------


def merge_seeds(rows: Sequence[Row]) -> list[Row]:
    """One row for all seeds of a model: means and standard deviations over the seeds that ended well, each once; contended
    ones count where no other did, and those that did not end well where none did."""
    same: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        same.setdefault(identity(row.runs[0]), []).append(row)
    return [_merged(members) for members in same.values()]


def _merged(rows: Sequence[Row]) -> Row:
    by_status = ([row for row in rows if row.status == status] for status in ENDED_WELL)
    good = next(filter(None, by_status), [])
    once: dict[Any, Row] = {}  # a repeated run is no second sample
    for row in good or rows:
        once.setdefault(row.seeds or row.runs[0].path, row)
    counted = list(once.values())
    figures = {}
    for name in {name for row in counted for name in row.figures}:
        values = [row.figures[name].value for row in counted if name in row.figures]
        spread = statistics.stdev(values) if len(values) > 1 else None
        figures[name] = Figure(statistics.fmean(values), spread, len(values))
    left = [row for row in rows if row not in counted] if good else rows
    said = ", ".join(
        ("repeated" if row.status == "ok" else row.status) + (f" (seed {row.seeds[0]})" if row.seeds else "")
        for row in left
    )
    remark = rows[0].remark
    if said and len(rows) > 1:
        remark = f"left out: {said}" if good else said
    return replace(
        rows[0],
        runs=tuple(run for row in rows for run in row.runs),
        figures=figures,
        status=counted[0].status,
        remark=remark,
        seeds=tuple(seed for row in counted for seed in row.seeds),
        chosen=any(row.chosen for row in rows),
    )
