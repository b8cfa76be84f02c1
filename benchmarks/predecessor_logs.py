"""Read the training logs of the research code that this project follows, correct them, and print a table in Markdown.

    python benchmarks/predecessor_logs.py FILE|FOLDER...

Its `train.py` wrote a line like this every ten steps or so:

    step     10 | loss 5.4011 | lr 2.70e-06 | grad 67.00 | tok/s 4178

Corrected: the loss was the sum over the micro-batches of an accumulation, not their mean; "last 100" meant 100 lines, not 100
steps; lines with a loss of nan were left out. Named, because it cannot be corrected: until 22 February 2026 the loader filled
chunks with zeros that were trained on and scored; the learning rate could fall to nothing after the warm-up and rise again.

The losses are training losses in nats per byte; nothing was held out. They do not compare with runs of this package.
"""

from __future__ import annotations

import math
import re
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path

WINDOW = 100  # steps
PADDED_UNTIL = "20260222"
NUMBER = r"([0-9.,eE+-]+|nan|inf|-inf)"
LINE = re.compile(
    rf"^\s*step\s+(\d[\d,]*)\s*\|\s*loss\s+{NUMBER}(?:\s*\|\s*lr\s+{NUMBER})?(?:\s*\|\s*grad\s+{NUMBER})?"
    rf"(?:\s*\|\s*tok/s\s+{NUMBER})?"
)


@dataclass
class Log:
    """One log, corrected. `lines`: (step, mean loss since the line before, learning rate or nan), by rising step."""

    path: Path
    model: str
    parameters: int | None
    status: str
    lines: list[tuple[int, float, float]]
    reported: float
    tok_s: float
    notes: list[str] = field(default_factory=list)

    @property
    def steps(self) -> int:
        return self.lines[-1][0] if self.lines else 0

    def mean_loss(self) -> float:
        """Mean over the last `WINDOW` steps. A line that reaches beyond the window counts with its share of it."""
        total, weight, before = 0.0, 0, 0
        for step, loss, _ in self.lines:
            steps = step - max(before, self.steps - WINDOW)
            if steps > 0:
                total, weight = total + steps * loss, weight + steps
            before = step
        return total / weight if weight else math.nan


def read_log(path: Path) -> Log | None:
    """One log; None if no line of the file looks like one."""
    text = path.read_text(encoding="utf-8", errors="replace")
    rows = [match.groups() for line in text.splitlines() if (match := LINE.match(line))]
    if not rows:
        return None

    def find(pattern: str, default: str = "") -> str:
        hit = re.search(pattern, text, re.MULTILINE)
        return hit.group(1).replace(",", "") if hit else default

    level, parameters = find(r"^Model: Level (\S+)") or path.stem, find(r"(\d[\d,]*) parameters")
    accumulate = int(find(r"^Gradient accumulation: (\d+)", "1"))
    lines: list[tuple[int, float, float]] = []
    for step, loss, rate, _, _ in rows:
        number = int(step.replace(",", ""))
        while lines and lines[-1][0] >= number:
            lines.pop()  # the run was started again from an earlier step
        lines.append((number, value(loss) / accumulate, value(rate)))
    speeds = [v for row in rows if math.isfinite(v := value(row[4]))]
    finite = [v for row in rows if math.isfinite(v := value(row[1]))]
    last_lines = statistics.fmean(finite[-100:]) if finite else math.nan
    log = Log(
        path,
        f"E{level}" if level.isdigit() else level,
        int(parameters) if parameters else None,
        status(text, lines),
        lines,
        float(find(rf"^FINAL_LOSS_LAST100: {NUMBER}", str(last_lines))),
        statistics.median(speeds[len(speeds) // 10 :]) if speeds else math.nan,
    )
    day = find(r"_(20\d{6})_\d{6}")
    if accumulate > 1:
        log.notes.append(f"corrected: loss divided by {accumulate}, the accumulation")
    if day < PADDED_UNTIL and "TBPTT enabled" not in text:
        log.notes.append(f"{'' if day else 'perhaps '}zeros were trained on and scored: the loss is too low")
    if rose_again([rate for _, _, rate in lines if math.isfinite(rate)]):
        log.notes.append("the learning rate fell after the warm-up and rose again")
    if (last := int(find(r"Final step: (\d+)", "0"))) > log.steps:
        log.notes.append(f"steps {log.steps + 1:,} to {last:,} are not in the log")
    return log


def value(text: str | None) -> float:
    try:
        return math.nan if text is None else float(text.replace(",", ""))
    except ValueError:
        return math.nan  # such as a line that was cut


def status(text: str, lines: list[tuple[int, float, float]]) -> str:
    diverged = next((step for step, loss, _ in lines if not math.isfinite(loss)), None)
    if diverged is not None:
        return f"diverged@{diverged}"
    if re.search(r"CUDA out of memory|OutOfMemoryError", text):
        return "oom"
    if re.search(r"^Traceback \(most recent call last\)", text, re.MULTILINE):
        return "crashed"
    return "ok" if "training complete!" in text.lower() else "incomplete"


def rose_again(rates: list[float]) -> bool:
    """Whether the rate fell below a tenth of a peak and then rose to more than ten times its lowest value."""
    peak = low = 0.0
    for rate in rates:
        if rate >= peak and low == 0.0:
            peak = rate
        elif rate < 0.1 * peak and (low == 0.0 or rate < low):
            low = rate
        elif low and rate > 10 * low:
            return True
    return False


def table(logs: list[Log]) -> str:
    """The best corrected loss first; what did not end well last."""
    heads = "| model | parameters | reported | last 100 steps | steps | tok/s | status | log | notes |"
    rows = [heads, "|---|--:|--:|--:|--:|--:|---|---|---|"]
    for log in sorted(logs, key=lambda log: (log.status != "ok", log.mean_loss(), log.path)):
        size = "–" if log.parameters is None else f"{log.parameters:,}"
        rows.append(
            f"| {log.model} | {size} | {log.reported:.4f} | {log.mean_loss():.4f} | {log.steps:,} | {log.tok_s:,.0f} "
            f"| {log.status} | {log.path.name} | {'; '.join(log.notes)} |"
        )
    return "\n".join(rows)


def main(paths: list[str]) -> int:
    found: list[Log] = []
    for path in map(Path, paths):
        files = [p for p in sorted(path.rglob("*")) if p.suffix in (".log", ".txt")] if path.is_dir() else [path]
        found += [log for file in files if file.is_file() and (log := read_log(file)) is not None]
    if not found:
        print("no file given has lines like 'step N | loss X | …'", file=sys.stderr)
        return 2
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
