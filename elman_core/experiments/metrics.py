"""Reading metrics.jsonl: as much as is needed, while it is being written, and whatever a kill left of it. Needs no torch.

A line that is not whole JSON is left out and counted. Steps never fall: where a line's step is not above the one before, as
after a resume that could not cut the file, the later line stands.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elman_core.registry import StorageError

METRICS = "metrics.jsonl"
_LINE, _PAGE = 384, 1 << 16  # bytes: about a line; read at a time, at most


@dataclass(frozen=True)
class Metrics:
    """What a run measured.

    Attributes:
        steps: one object an optimizer step, by rising `step`. evaluations: likewise.
        broken: lines that could not be read.
    """

    steps: Sequence[dict[str, Any]] = ()
    evaluations: Sequence[dict[str, Any]] = ()
    broken: int = 0

    def column(self, name: str) -> list[float]:
        """One figure of every step; nan where a line lacks it."""
        return [float(line.get(name, "nan")) for line in self.steps]


@dataclass
class _Lines:
    """Lines sorted into kinds as they come."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    broken: int = 0

    def add(self, text: bytes) -> None:
        line = _parse(text)
        if line is None:
            self.broken += 1
            return
        kept = {"step": self.steps, "evaluation": self.evaluations}.get(line["kind"])
        if kept is None:
            return  # a kind that a plugin or a later version writes
        while kept and kept[-1]["step"] >= line["step"]:
            kept.pop()
        kept.append(line)


def read_metrics(run: Path) -> Metrics:
    """All of a run's metrics; nothing if it has not begun to write them. Raises `StorageError` if the file cannot be read."""
    lines = _Lines()
    for text in _open(run / METRICS, lambda file: file.read().split(b"\n")) or []:
        if text.strip():
            lines.add(text)
    return Metrics(lines.steps, lines.evaluations, lines.broken)


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
    steps = read_metrics(run).steps
    return [line for line in steps if until is None or line["step"] <= until][-count:]


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
                lines.append(line)
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
    whole = isinstance(line, dict) and isinstance(line.get("step"), int) and "kind" in line
    return line if whole else None
