"""What a table of results is made of: figures, rows, groups."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .names import spelled
from .runs import Run


@dataclass(frozen=True)
class Figure:
    """A number of a row: a mean over `count` seeds with their standard deviation, which one seed does not have."""

    value: float
    spread: float | None = None
    count: int = 1


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Figures by name, absent where not known: `parameters`; `bits_per_byte` on the held-out text; `loss` at the tokens that all
    of the group saw, and `last_100`, in nats per byte, means of 100 steps; `tok_s`, median after warm-up; `peak_memory`, bytes;
    `minutes` in steps; `bytes_seen`.
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
    progress: float | None = None
    """Of a run in progress: the fraction done."""

    def value(self, name: str) -> float:
        """A figure's value; nan if it is not known."""
        figure = self.figures.get(name)
        return math.nan if figure is None else figure.value


@dataclass(frozen=True)
class Group:
    """Rows that may be ranked.

    Attributes:
        protocol, hash: what they share. target: the size that a suite asked for, if it asked for several.
        tokens: bytes that every finished run saw. notes: what a reader must know besides.
    """

    hash: str
    protocol: Mapping[str, Any]
    target: str | None
    rows: tuple[Row, ...]
    tokens: int | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Results:
    """All groups, and what differs between their protocols: `{key: (value in each group)}`."""

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
