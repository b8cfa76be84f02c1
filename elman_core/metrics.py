"""Reading metrics.jsonl, also while it is being written or after a kill. Needs no torch.

A damaged line is left out and counted. Steps rise: if a step occurs twice, as after a resume that could not cut
the file, the later line counts.
"""

from __future__ import annotations

import json
import math
import statistics
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elman_core.registry import StorageError
from elman_core.storage import read_line

METRICS = "metrics.jsonl"
COLUMNS = ("step", "loss", "lr", "grad_norm", "tok_s", "memory", "seconds", "bytes_seen")
WINDOW = 100
"""Number of optimizer steps over which losses are averaged."""
TAIL = 1 << 14  # bytes at the end of the file; a line has some hundred


@dataclass(frozen=True)
class Metrics:
    """The measurements of a run.

    Attributes:
        columns: for each of `COLUMNS` one value per optimizer step, by rising step; nan where a line lacks it.
        evaluations: one object per evaluation, by rising `step`. broken: number of lines that could not be read.
    """

    columns: Mapping[str, array[float]]
    evaluations: Sequence[dict[str, Any]] = ()
    broken: int = 0

    def __len__(self) -> int:
        """Optimizer steps."""
        return len(self.columns["step"])

    def known(self, name: str, first: int = 0) -> list[float]:
        """The finite values of a column, from the step at index `first` on (which may count from the end)."""
        return [v for v in self.columns[name][first:] if math.isfinite(v)]

    def summary(self, tokens_per_step: int = 0) -> dict[str, Any]:
        """The figures of a run so far: last held-out bits per byte, mean loss of the last 100 steps, median tok/s, peak memory.

        Args:
            tokens_per_step: bytes, for older runs, whose steps do not say how many they have seen.
        """
        found: dict[str, Any] = {}
        if self.evaluations and "bits_per_byte" in self.evaluations[-1]:
            last = self.evaluations[-1]
            found |= {"bits_per_byte": last["bits_per_byte"], "evaluated_at": last["step"]}
        if not len(self):
            return found
        if losses := self.known("loss", -WINDOW):
            found["loss_last_100_steps"] = statistics.fmean(losses)
        if speeds := self.known("tok_s", len(self) // 10):
            found["tok_s"] = statistics.median(speeds)
        if memory := self.known("memory"):
            found["peak_memory"] = int(max(memory))
        if seen := (self.known("bytes_seen", -1) or [tokens_per_step * self.columns["step"][-1]])[0]:
            found["bytes_seen"] = int(seen)
        return found


class _Lines:
    """Sorts lines by kind. Steps become columns, since objects take ten times the memory."""

    def __init__(self) -> None:
        self.columns = {name: array("d") for name in COLUMNS}
        self.evaluations: list[dict[str, Any]] = []
        self.broken = 0

    def add(self, text: bytes, id: str) -> None:
        line = read_line(text, id)
        if line is None:
            self.broken += 1
        elif line["kind"] == "evaluation":
            while self.evaluations and self.evaluations[-1]["step"] >= line["step"]:
                self.evaluations.pop()
            self.evaluations.append(line)
        elif line["kind"] == "step":  # other kinds come from plugins or later versions
            steps = self.columns["step"]
            while steps and steps[-1] >= line["step"]:  # these steps were done again
                for column in self.columns.values():
                    column.pop()
            for name, column in self.columns.items():
                column.append(_number(line.get(name)))


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def read_metrics(run: Path, id: str = "") -> Metrics:
    """All metrics of a run; empty before it writes any. Raises `StorageError` if the file cannot be read.

    Args:
        id: of the run, in its manifest; older runs have none.
    """
    lines = _Lines()

    def read(file: Any) -> None:
        for text in file:
            if text.strip():
                lines.add(text, id)

    _open(run / METRICS, read)
    return Metrics(lines.columns, lines.evaluations, lines.broken)


@dataclass(frozen=True)
class Progress:
    """The last step of a run: its number, mean loss of 20 steps in nats per byte, speed, and bits per byte if evaluated."""

    step: int
    loss: float
    tok_s: float
    seconds: float
    bits_per_byte: float | None


def progress(run: Path) -> Progress | None:
    """How far a run is, from the end of its metrics, which is cheap enough for several calls a second. None before a step."""
    lines = _open(run / METRICS, _tail) or []
    steps = [line for line in lines if line["kind"] == "step"]
    scored = [line["bits_per_byte"] for line in lines if line["kind"] == "evaluation" and "bits_per_byte" in line]
    if not steps:
        return None
    last, losses = steps[-1], [_number(line.get("loss")) for line in steps[-20:]]
    speed, seconds = _number(last.get("tok_s")), _number(last.get("seconds"))
    return Progress(last["step"], sum(losses) / len(losses), speed, seconds, scored[-1] if scored else None)


def _open(path: Path, read: Callable[[Any], Any]) -> Any:
    try:
        with path.open("rb") as file:
            return read(file)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error


def _tail(file: Any) -> list[dict[str, Any]]:
    """The whole lines among the last `TAIL` bytes of a file."""
    size = file.seek(0, 2)
    file.seek(max(0, size - TAIL))
    lines = file.read().splitlines()[1 if size > TAIL else 0 :]
    return [line for text in lines if (line := _parse(text)) is not None]


def _parse(text: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    whole = isinstance(line, dict) and type(line.get("step")) is int and isinstance(line.get("kind"), str)
    return line if whole else None
