"""Where the time of a step goes: its kernels by time, and how long the device was idle between them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class Row:
    """A kernel (on a CPU: an operation): how often a step runs it, microseconds a step, share of the busy time."""

    name: str
    calls: float
    us: float
    share: float


@dataclass(frozen=True)
class Profile:
    """What a step does.

    Attributes:
        rows: longest first. wall_us: from the first kernel's start to the last one's end, a step.
        busy_us: during which at least one kernel ran. idle: the rest, as a fraction: launch gaps and waiting.
    """

    rows: list[Row]
    wall_us: float
    busy_us: float
    idle: float

    def markdown(self, most: int = 40) -> str:
        """A table of the longest `most`."""
        lines = [
            f"{self.wall_us:,.0f} µs a step, {self.busy_us:,.0f} busy, {self.idle:.1%} idle",
            "",
            "| kernel | calls | µs | share |",
            "|---|---|---|---|",
        ]
        lines += [f"| `{r.name[:110]}` | {r.calls:g} | {r.us:,.1f} | {r.share:.1%} |" for r in self.rows[:most]]
        rest = self.rows[most:]
        if rest:
            us, share = sum(r.us for r in rest), sum(r.share for r in rest)
            lines.append(f"| {len(rest)} others | {sum(r.calls for r in rest):g} | {us:,.1f} | {share:.1%} |")
        return "\n".join(lines) + "\n"

    def write(self, path: Path) -> None:
        """The table beside all rows as JSON: `path` with `.md` and `.json`."""
        path.with_suffix(".md").write_text(self.markdown(), encoding="utf-8")
        path.with_suffix(".json").write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def profile_steps(run: Callable[[], Any], steps: int, device: torch.device) -> Profile:
    """Profile `run`, which runs `steps` steps and waits for them; warm-up steps come first."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities, acc_events=True) as taken:
        run()
        if on_gpu:
            torch.cuda.synchronize(device)
    return summarize(_spans(taken.events(), on_gpu), steps)


def summarize(spans: Iterable[tuple[str, float, float]], steps: int) -> Profile:
    """The profile of (name, start, end) in microseconds, over so many steps."""
    each = sorted(spans, key=lambda s: s[1])
    times: dict[str, list[float]] = defaultdict(list)
    busy, reached = 0.0, float("-inf")
    for name, start, end in each:
        times[name].append(end - start)
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    wall = reached - each[0][1] if each else 0.0
    total = sum(map(sum, times.values())) or 1.0
    rows = [Row(name, len(t) / steps, sum(t) / steps, sum(t) / total) for name, t in times.items()]
    rows.sort(key=lambda r: -r.us)
    return Profile(rows, wall / steps, busy / steps, 1 - busy / wall if wall else 0.0)


def _spans(events: Any, on_gpu: bool) -> Iterable[tuple[str, float, float]]:
    for event in events or ():
        kernel = event.device_type == DeviceType.CUDA if on_gpu else event.cpu_parent is None
        if kernel and not getattr(event, "is_user_annotation", False):
            yield event.name, event.time_range.start, event.time_range.end
