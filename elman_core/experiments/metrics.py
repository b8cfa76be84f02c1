"""Reading metrics.jsonl: as much as is needed, while it is being written, and whatever a kill left of it. Needs no torch.

A line that is not whole JSON is left out and counted. Steps never fall: where a line's step is not above the one before, as
after a resume that could not cut the file, the later line stands.
"""

from __future__ import annotations

import bisect
import json
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elman_core.registry import StorageError

METRICS = "metrics.jsonl"
COLUMNS = ("step", "loss", "lr", "grad_norm", "tok_s", "memory", "seconds", "bytes_seen")
_LINE, _PAGE = 384, 1 << 16  # bytes: about a line; read at a time, at most
_CHUNK = 4096  # lines kept as objects


@dataclass(frozen=True)
class Metrics:
    """What a run measured.

    Attributes:
        columns: each of `COLUMNS`, a value an optimizer step, by rising step; nan where a line lacks it.
        evaluations: one object an evaluation, by rising `step`. broken: lines that could not be read.
    """

    columns: Mapping[str, array[float]]
    evaluations: Sequence[dict[str, Any]] = ()
    broken: int = 0

    def __len__(self) -> int:
        """Optimizer steps."""
        return len(self.columns["step"])

    def column(self, name: str) -> array[float]:
        """One figure of every step."""
        return self.columns[name]

    def known(self, name: str, first: int = 0) -> list[float]:
        """The finite values of a column, from the step at index `first` on (which may count from the end)."""
        return [v for v in self.columns[name][first:] if math.isfinite(v)]


class _Lines:
    """Lines sorted into kinds as they come. Steps become columns some thousand at a time: objects would take ten times the
    memory."""

    def __init__(self) -> None:
        self.columns = {name: array("d") for name in COLUMNS}
        self.new: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []
        self.broken = 0

    def add(self, text: bytes) -> None:
        line = _parse(text)
        if line is None:
            self.broken += 1
        elif line["kind"] == "evaluation":
            _after(self.evaluations, line)
        elif line["kind"] == "step":  # others: what a plugin or a later version writes
            self._back_to(line["step"])
            self.new.append(line)
            if len(self.new) >= _CHUNK:
                self.flush()

    def _back_to(self, step: int) -> None:
        """Forget this step and later ones: they were done again."""
        while self.new and self.new[-1]["step"] >= step:
            self.new.pop()
        steps = self.columns["step"]
        while not self.new and steps and steps[-1] >= step:
            for column in self.columns.values():
                column.pop()

    def flush(self) -> None:
        for name, column in self.columns.items():
            column.extend([_number(line.get(name)) for line in self.new])
        self.new.clear()


def _after(lines: list[dict[str, Any]], line: dict[str, Any]) -> None:
    while lines and lines[-1]["step"] >= line["step"]:
        lines.pop()
    lines.append(line)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def read_metrics(run: Path) -> Metrics:
    """All of a run's metrics; nothing if it has not begun to write them. Raises `StorageError` if the file cannot be read."""
    lines = _Lines()

    def read(file: Any) -> None:
        for text in file:
            if text.strip():
                lines.add(text)

    _open(run / METRICS, read)
    lines.flush()
    return Metrics(lines.columns, lines.evaluations, lines.broken)


def last_steps(run: Path, count: int, until: int | None = None) -> list[dict[str, Any]]:
    """The last `count` steps, or the last up to step `until`, without reading the rest of the file.

    The place of a step is found by bisection, for steps only rise. Where they do not, or a line is broken near the place, the
    whole file is read.

    Raises:
        StorageError: the file cannot be read.
    """
    found = _open(run / METRICS, lambda file: _before(file, count, until)) or []
    numbers = [line["step"] for line in found]
    if numbers and numbers == list(range(numbers[0], numbers[0] + len(numbers))) and _whole(numbers, count, until):
        return found
    columns = read_metrics(run).columns
    end = bisect.bisect_right(columns["step"], math.inf if until is None else until)
    rows = range(max(0, end - count), end)
    return [
        {n: c[i] for n, c in columns.items() if not math.isnan(c[i])} | {"step": int(columns["step"][i])} for i in rows
    ]


def _whole(numbers: list[int], count: int, until: int | None) -> bool:
    return (len(numbers) == count or numbers[0] == 1) and (until is None or numbers[-1] == until)


def _open(path: Path, read: Callable[[Any], Any]) -> Any:
    try:
        with path.open("rb") as file:
            return read(file)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error


def _before(file: Any, count: int, until: int | None) -> list[dict[str, Any]]:
    """Steps that end at `until`, read backwards from where bisection finds it."""
    end = file.seek(0, 2)
    if until is not None:
        end = _place_after(file, end, until)
    lines: list[dict[str, Any]] = []
    rest = b""
    while end > 0 and len(lines) < count:
        start = max(0, end - min(_PAGE, _LINE * (count - len(lines) + 1)))
        file.seek(start)
        first, *whole = (file.read(end - start) + rest).split(b"\n")
        for text in reversed(whole if start else [first, *whole]):
            line = _parse(text) if text.strip() and len(lines) < count else None
            if line is not None and line["kind"] == "step":
                lines.append({k: v for k, v in line.items() if isinstance(v, int | float)})
        rest, end = first, start
    return lines[::-1]


def _place_after(file: Any, end: int, step: int) -> int:
    """Where the first line after `step` begins."""
    low, high = 0, end  # every line that begins before `low` is of `step` or earlier
    while low < high:
        middle = (low + high) // 2
        file.seek(max(0, middle - 1))
        if middle:
            file.readline()  # to where the next line begins, which may be `middle` itself
        begins = file.tell()
        line = None
        while line is None and begins < high:
            text = file.readline()
            line = _parse(text)
            begins = begins if line is not None else file.tell()
        if line is None or line["step"] > step:
            high = middle
        else:
            low = file.tell()
    return low


def _parse(text: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    whole = isinstance(line, dict) and type(line.get("step")) is int and isinstance(line.get("kind"), str)
    return line if whole else None
