"""Reading metrics.jsonl, also while it is being written or after a kill. Needs no torch.

A damaged line is left out and counted. Training writes steps one by one: lines in another order are put in order and
counted, and of two lines of one step the later counts. A mean over steps is known only if all of them are.
"""

from __future__ import annotations

import bisect
import itertools
import math
import os
import statistics
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elman_core.registry import StorageError
from elman_core.storage import open_regular, read_line

METRICS = "metrics.jsonl"
COLUMNS = ("step", "loss", "lr", "grad_norm", "tok_s", "memory", "seconds", "bytes_seen", "counted")
WINDOW = 100
"""Number of optimizer steps over which losses are averaged."""
TAIL = 1 << 14  # bytes at the end of the file; a line has some hundred
LONGEST, MOST = 1 << 20, 1 << 34
"""Bytes of a line and of the file."""


@dataclass(frozen=True)
class Metrics:
    """The measurements of a run.

    Attributes:
        columns: for each of `COLUMNS` one value per optimizer step, by rising step; nan where a line lacks it.
        evaluations: one object per evaluation, by rising `step`.
        broken: number of lines that are damaged, repeated or misplaced.
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

    @property
    def lacking(self) -> int:
        """Optimizer steps before the last one that have no line."""
        return int(self.columns["step"][-1]) - len(self) if len(self) else 0

    def mean_loss(self, step: int | None = None) -> float | None:
        """Mean loss over the targets of the `WINDOW` steps up to `step` (the last), or of all if there are fewer; None if a
        step is missing, or no target counts."""
        steps = self.columns["step"]
        if step is None:
            step = int(steps[-1]) if steps else 0
        count = min(WINDOW, step)
        end = bisect.bisect_right(steps, step)
        losses, shares = (self.columns[name][max(0, end - count) : end] for name in ("loss", "counted"))
        whole = 0 < count == len(losses) and steps[end - count] == step - count + 1
        known = all(map(math.isfinite, (*losses, *shares)))
        return statistics.fmean(losses, shares) if whole and known and any(shares) else None

    def summary(self) -> dict[str, Any]:
        """The figures of a run so far: last held-out bits per byte, mean loss of the last 100 steps, median tok/s, peak memory,
        bytes seen, and how many steps have no line."""
        found: dict[str, Any] = {}
        if self.evaluations and "bits_per_byte" in self.evaluations[-1]:
            last = self.evaluations[-1]
            found |= {"bits_per_byte": last["bits_per_byte"], "evaluated_at": last["step"]}
        if not len(self):
            return found
        if (loss := self.mean_loss()) is not None:
            found["loss_last_100_steps"] = loss
        if self.lacking:
            found["lacking_steps"] = self.lacking
        if speeds := self.known("tok_s", len(self) // 10):
            found["tok_s"] = statistics.median(speeds)
        if memory := self.known("memory"):
            found["peak_memory"] = int(max(memory))
        if seen := self.known("bytes_seen", -1):
            found["bytes_seen"] = int(seen[0])
        return found


def _number(value: Any) -> float:
    whole = isinstance(value, int) and abs(value) < 2**63  # others may be no float
    return float(value) if whole or isinstance(value, float) else math.nan


def read_metrics(run: Path, id: str = "") -> Metrics:
    """All metrics of a run; empty before it writes any. Raises `StorageError` if the file cannot be read.

    Args:
        id: of the run, in its manifest; older runs have none.
    """
    columns = {name: array("d") for name in COLUMNS}  # objects would take ten times the memory
    evaluations: list[dict[str, Any]] = []
    broken = 0
    for line in read_lines(run, id):
        if line is None:
            broken += 1
        elif line["kind"] == "evaluation":
            evaluations.append(line)
        elif line["kind"] == "step":  # other kinds come from plugins or later versions
            for name, column in columns.items():
                column.append(_number(line.get(name, 1 if name == "counted" else None)))
    for steps in (columns["step"], [line["step"] for line in evaluations]):
        broken += sum(a >= b for a, b in itertools.pairwise(steps))
    evaluations = [evaluations[i] for i in _order([line["step"] for line in evaluations])]
    order = _order(columns["step"])
    return Metrics({name: array("d", (c[i] for i in order)) for name, c in columns.items()}, evaluations, broken)


def _order(steps: Sequence[float]) -> Sequence[int]:
    """The places of the lines by rising step; of two lines of one step, of the later."""
    latest = {step: place for place, step in enumerate(steps)}
    return [latest[step] for step in sorted(latest)]


def read_lines(run: Path, id: str) -> Iterator[dict[str, Any] | None]:
    """The lines of metrics.jsonl, None for each damaged one; a last line that is not complete is left out. Raises
    `StorageError`: the file is there and cannot be read, or is not one of metrics."""
    try:
        with open(open_regular(run / METRICS), "rb") as file:
            if os.fstat(file.fileno()).st_size > MOST:
                raise StorageError(f"cannot read {run / METRICS}: it is longer than {MOST:,} bytes")
            while (text := file.readline(LONGEST)).endswith(b"\n") or len(text) == LONGEST:
                if text.strip():
                    yield read_line(text, id)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StorageError(f"cannot read {run / METRICS}: {error.strerror or error}") from error


@dataclass(frozen=True)
class Progress:
    """The last step of a run: its number, mean loss of 20 steps in nats per byte, speed, and bits per byte if evaluated."""

    step: int
    loss: float
    tok_s: float
    seconds: float
    bits_per_byte: float | None


def progress(run: Path, id: str | None = None) -> Progress | None:
    """The last step of a run from the end of its metrics; None before a step. Cheap enough for several calls a second.

    Args:
        id: of the run, with which lines are compared if it is given.
    """
    try:
        with open(open_regular(run / METRICS), "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL))
            texts = file.read(TAIL).splitlines()[1 if size > TAIL else 0 :]
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"cannot read {run / METRICS}: {error.strerror or error}") from error
    lines = sorted(filter(None, (read_line(text, id) for text in texts)), key=lambda line: line["step"])
    steps = [line for line in lines if line["kind"] == "step"]
    scored = [line["bits_per_byte"] for line in lines if line["kind"] == "evaluation" and "bits_per_byte" in line]
    if not steps:
        return None
    last = steps[-1]
    losses = [_number(line.get("loss")) for line in steps[-20:] if line.get("counted", 1)]
    loss = statistics.fmean(losses) if losses else math.nan
    bits_per_byte = scored[-1] if scored else None
    return Progress(last["step"], loss, _number(last.get("tok_s")), _number(last.get("seconds")), bits_per_byte)
