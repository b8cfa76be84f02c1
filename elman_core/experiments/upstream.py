"""The predecessor's plain-text logs, with what they get wrong put right where that can be, and named where it cannot.

Two of its programs wrote them. `train.py`, one line every ten steps or so:

    step     10 | loss 5.4011 | lr 2.70e-06 | grad 67.00 | tok/s 4178

where the loss is the sum over the micro-batches of an accumulation, not their mean; its `FINAL_LOSS_LAST100`, and the tool that
read the logs, averaged the last hundred such *lines*, and left lines with a loss of nan out. And `train_ladder.py`:

    Step     10 | Loss 5.4011 | LR 2.70e-06 | Grad 67.00 | Tok/s 4,178 | Elapsed 39.2s

where a step is a micro-batch, and tok/s the average since the start, compilation included. Both cut the text at its separators
and filled up with zeros that they trained on and scored until 22 February 2026; and the schedule of `train.py`'s AdamW fell to
nothing after the warm-up and rose again, for ever.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from elman_core.registry import ConfigError, DataError

from .results import WINDOW

PADDED_UNTIL = "20260222"
"""Day from which its loader no longer filled up with zeros that were scored."""

_NUMBER = r"([0-9.,eE+-]+|nan|inf|-inf)"
_LINE = re.compile(
    rf"^\s*step\s+(\d[\d,]*)\s*\|\s*loss\s+{_NUMBER}(?:\s*\|\s*lr\s+{_NUMBER})?(?:\s*\|\s*grad\s+{_NUMBER})?"
    rf"(?:\s*\|\s*tok/s\s+{_NUMBER})?(?:\s*\|\s*elapsed\s+{_NUMBER}s)?",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Entry:
    """A line of a log: the mean over the steps after the line before, up to `step`; corrected."""

    step: int
    loss: float
    lr: float | None
    tok_s: float | None


@dataclass(frozen=True)
class Log:
    """What a log says, corrected.

    Attributes:
        model: the level's name. parameters, tokens_per_step (bytes): None if the log does not say.
        entries: in optimizer steps. reported: the loss that the predecessor's own tool gives. tok_s: median.
        status: ok, diverged@step, oom, crashed or incomplete. corrected, doubtful: what was put right, and what could not be.
    """

    path: Path
    model: str
    parameters: int | None
    tokens_per_step: int | None
    entries: Sequence[Entry]
    reported: float | None
    tok_s: float | None
    status: str
    corrected: Sequence[str] = field(default=())
    doubtful: Sequence[str] = field(default=())

    @property
    def steps(self) -> int:
        return self.entries[-1].step if self.entries else 0

    @property
    def tokens(self) -> int | None:
        return None if self.tokens_per_step is None else self.steps * self.tokens_per_step

    def mean_loss(self, until: int | None = None, window: int = WINDOW) -> float | None:
        """Mean over the `window` steps up to `until` (the last one logged), nats; None if the log does not reach there.

        A line stands for all steps since the line before. One that reaches beyond the window counts with its share of it.
        """
        until = self.steps if until is None else until
        total, weight, before = 0.0, 0, 0
        for entry in self.entries:
            steps = min(entry.step, until) - max(before, until - window)
            if steps > 0:
                total, weight = total + steps * entry.loss, weight + steps
            before = entry.step
        return total / weight if weight and until <= self.steps else None


def read_logs(paths: Iterable[Path]) -> list[Log]:
    """The logs among some files, and below some folders (`*.log`, `*.txt`).

    Raises:
        ConfigError: a path is not there. DataError: a file is no log of the predecessor, or a folder has none.
    """
    found = []
    for path in paths:
        if not path.exists():
            raise ConfigError(f"there is no {path}")
        if path.is_dir():
            inside = [p for p in sorted(path.rglob("*")) if p.suffix in (".log", ".txt") and p.is_file()]
            logs = [log for p in inside if (log := read_log(p)) is not None]
            if not logs:
                raise DataError(f"{path} holds no log of the predecessor: no file with lines 'step N | loss X | …'")
            found += logs
        elif (log := read_log(path)) is not None:
            found.append(log)
        else:
            raise DataError(f"{path} is no log of the predecessor: it has no line 'step N | loss X | …'")
    return found


def read_log(path: Path) -> Log | None:
    """One log; None if nothing in it looks like one. Raises `DataError` if it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    rows = [m.groups() for line in text.splitlines() if (m := _LINE.match(line))]
    begun = re.search(r"^Starting training (?:from step|for) ", text, re.MULTILINE)
    if not rows and not (begun and "Level" in text):
        return None
    ladder = "Elman Ablation Ladder Training" in text or any(row[5] for row in rows)
    facts = _Facts(text, ladder)
    entries = _entries(rows, facts)
    diverged = next((e.step for e in entries if not math.isfinite(e.loss)), None)
    reported = _reported(text, rows, ladder)
    return Log(
        path,
        facts.model or path.stem,
        facts.parameters,
        facts.tokens_per_step,
        entries,
        reported,
        _speed(rows, facts),
        _status(text, diverged),
        tuple(_corrections(entries, facts, diverged, rows)),
        tuple(_doubts(entries, facts)),
    )


class _Facts:
    """What the head of a log says."""

    def __init__(self, text: str, ladder: bool) -> None:
        def find(pattern: str) -> str | None:
            hit = re.search(pattern, text, re.MULTILINE)
            return hit.group(1) if hit else None

        def number(pattern: str) -> int | None:
            found = find(pattern)
            return int(found.replace(",", "")) if found else None

        self.ladder = ladder
        level = find(r"^\s*Level (\S+): .*<-- TRAINING") or find(r"^Model: Level (\S+),") or find(r"--level[ =](\S+)")
        self.model = level if level is None or not level.isdigit() else f"E{level}"
        self.parameters = number(r"(\d[\d,]*) parameters") or number(r"^Model Parameters: (\d[\d,]*)")
        rows = number(r"^Batch size(?: per GPU)?: (\d+)")
        chunk = number(r"Chunk size: (\d+)") or number(r"--chunk_size[ =](\d+)")
        world = number(r"World size: (\d+)") or 1
        effective = number(r"[Ee]ffective batch(?: size)?: (\d+)")
        self.accumulate = number(r"^Gradient accumulation: (\d+)") or 1
        if ladder and rows and effective:
            self.accumulate = max(1, effective // (rows * world))
        self.tokens_per_step = number(r"^Tokens per step: (\d[\d,]*)")
        if self.tokens_per_step is None and rows and chunk:
            self.tokens_per_step = rows * world * self.accumulate * chunk
        self.first = number(r"^Starting training from step (\d+)") or 0
        self.last = number(r"Final step: (\d+)")
        self.day = find(r"_(20\d{6})_\d{6}") or (find(r"^# Started: (\d{4}-\d\d-\d\d)") or "").replace("-", "") or None
        self.streams = "TBPTT enabled" in text


def _entries(rows: Sequence[tuple[str | None, ...]], facts: _Facts) -> list[Entry]:
    entries: list[Entry] = []
    for step, loss, lr, _, tok_s, _ in rows:
        number = int(str(step).replace(",", ""))
        value = _value(loss)
        if facts.ladder:
            number = -(-number // facts.accumulate)
        elif value is not None:
            value /= facts.accumulate
        while entries and entries[-1].step >= number:
            entries.pop()  # the run was started again from an earlier step
        entries.append(Entry(number, math.nan if value is None else value, _value(lr), _value(tok_s)))
    return entries


def _value(text: str | None) -> float | None:
    try:
        return None if text is None else float(text.replace(",", ""))
    except ValueError:
        return None  # such as a line that was cut


def _reported(text: str, rows: Sequence[tuple[str | None, ...]], ladder: bool) -> float | None:
    """What the predecessor printed: its own last figure, else what its extractor makes of the lines."""
    said = re.search(rf"^(?:FINAL_LOSS_LAST100|Final loss): {_NUMBER}", text, re.MULTILINE)
    if said:
        return _value(said.group(1))
    values = [v for row in rows if (v := _value(row[1])) is not None and math.isfinite(v)]
    return statistics.fmean(values[-(1 if ladder else 100) :]) if values else None


def _speed(rows: Sequence[tuple[str | None, ...]], facts: _Facts) -> float | None:
    """Median without the first tenth; of the running averages, the speed between lines."""
    speeds = [v for row in rows if (v := _value(row[4])) is not None]
    if facts.ladder:
        elapsed = [v for row in rows if (v := _value(row[5])) is not None]
        if len(elapsed) == len(speeds):
            seen = [speed * seconds for speed, seconds in zip(speeds, elapsed, strict=True)]
            between = [
                (b - a) / (t - s)
                for a, b, s, t in zip(seen, seen[1:], elapsed, elapsed[1:], strict=False)
                if t > s and b > a
            ]
            speeds = between or speeds
    return statistics.median(speeds[len(speeds) // 10 :]) if speeds else None


def _status(text: str, diverged: int | None) -> str:
    if diverged is not None:
        return f"diverged@{diverged}"
    if re.search(r"CUDA out of memory|OutOfMemoryError", text):
        return "oom"
    if re.search(r"^Traceback \(most recent call last\)", text, re.MULTILINE):
        return "crashed"
    return "ok" if re.search(r"Training complete!", text, re.IGNORECASE) else "incomplete"


def _corrections(
    entries: Sequence[Entry], facts: _Facts, diverged: int | None, rows: Sequence[tuple[str | None, ...]]
) -> list[str]:
    """What was put right."""
    found = []
    if facts.accumulate > 1:
        if facts.ladder:
            found.append(f"its steps were micro-batches: {facts.accumulate} make an optimizer step")
        else:
            found.append(f"loss divided by {facts.accumulate}: it was the sum over the accumulation")
    every = entries[-1].step - entries[-2].step if len(entries) > 1 else 1
    if facts.ladder:
        found.append(f"its final loss was the last line's; here, the mean of the last {WINDOW} steps")
        if any(row[5] for row in rows):
            found.append("tok/s between lines, not since the start")
    elif every > 1:
        found.append(
            f'its "last 100" were {min(100, len(entries))} lines of {every} steps; here, the mean of {WINDOW} steps'
        )
    if diverged is not None:
        found.append(f"lines with a loss that is not finite, from step {diverged:,} on, had been left out")
    return found


def _doubts(entries: Sequence[Entry], facts: _Facts) -> list[str]:
    """What is wrong with the figures and cannot be put right."""
    found = []
    if not facts.streams and (facts.day is None or facts.day < PADDED_UNTIL):
        when = "perhaps " if facts.day is None else ""
        found.append(
            f"{when}zeros that fill up chunks were trained on and scored: the loss is too low by an unknown amount"
        )
    low = _oscillation([e.lr for e in entries if e.lr is not None])
    if low is not None:
        found.append(f"the learning rate fell to {low:.0e} after the warm-up and rose again")
    if facts.last is not None and entries and not facts.ladder and facts.last > entries[-1].step:
        found.append(f"steps {entries[-1].step + 1:,} to {facts.last:,} are not in the log")
    if facts.first:
        found.append(f"the log begins at step {facts.first:,}")
    if any(not math.isfinite(e.loss) for e in entries):
        found.append("the last loss is not finite")
    return found


def _oscillation(rates: Sequence[float]) -> float | None:
    """The lowest rate between two peaks, if it fell below a tenth of a peak and rose to more than ten times itself."""
    peak = low = 0.0
    for rate in rates:
        if rate >= peak and low == 0.0:
            peak = rate
        elif rate < 0.1 * peak and (low == 0.0 or rate < low):
            low = rate
        elif low and rate > 10 * low:
            return low
    return None


def common_tokens(logs: Sequence[Log]) -> int | None:
    """Bytes that every log which ended well reaches; None if that is not known of all."""
    tokens = [log.tokens for log in logs if log.status == "ok"]
    return min((t for t in tokens if t), default=None) if tokens and all(tokens) else None
