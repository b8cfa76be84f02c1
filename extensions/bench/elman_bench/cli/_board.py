"""Progress of a scheduler: a live table on a terminal; else a line for each event, and one per minute."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from elman_core.extension import printable

if TYPE_CHECKING:
    from elman_bench.jobs.job import Job, State
    from elman_core.extension import TrainSettings

EVERY = 60.0
"""Seconds between two lines of progress without a terminal."""
_STYLES = {"ok": "green", "running": "bold", "waiting": "dim"}
_ORDER = ("running", "diverged", "oom", "crashed", "timeout", "killed", "incomplete", "lost", "waiting", "ok")


class Board:
    """Observer of a scheduler.

    Args:
        jobs: in order. lengths: steps or minutes of each job by id, if known. errors: write to standard error, if standard
            output is for JSON. watch: called with the states, often.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        lengths: Mapping[str, TrainSettings],
        errors: bool = False,
        watch: Callable[[Sequence[State]], None] | None = None,
    ) -> None:
        self.jobs, self.lengths, self.watch = {job.id: job for job in jobs}, lengths, watch
        self.console = Console(file=sys.stderr if errors else None, highlight=False)
        self.live: Live | None = None
        self.ended = False
        self.states: Sequence[State] = ()
        self.began = self.said = time.monotonic()

    @contextmanager
    def shown(self) -> Iterator[Board]:
        """Shows the table while the context is open, on a terminal."""
        if not self.console.is_terminal:
            yield self
            return
        with Live(get_renderable=self.table, console=self.console, refresh_per_second=2) as self.live:
            try:
                yield self
            finally:
                self.live, self.ended = None, True  # the command prints the last summary

    def event(self, text: str) -> None:
        from elman_core.extension import wrapped

        minutes, seconds = divmod(int(time.monotonic() - self.began), 60)
        width = self.console.width if self.console.is_terminal else None
        said = wrapped(f"[{minutes:3d}:{seconds:02d}] {printable(text)}", width)
        self.console.print(Text(said), soft_wrap=True)

    def tick(self, states: Sequence[State]) -> None:
        self.states = states
        if self.watch is not None:
            self.watch(states)
        if self.live is None and time.monotonic() - self.said > EVERY:
            self.said = time.monotonic()
            running = [state for state in states if state.status == "running"]
            each = "; ".join(f"{state.id} {self.far(state) or 'starting'}" for state in running)
            self.event(f"{summary(states)}: {each}" if each else summary(states))

    def table(self) -> Group:
        """As many jobs as fit on the terminal, running jobs first."""
        table = Table(box=None, pad_edge=False)
        for name in ("job", "status", "where"):  # a long name must not lose its end, which tells it apart
            table.add_column(name, no_wrap=True)
        table.add_column("")
        fitting = max(3, self.console.size.height - 4)
        for state in sorted(self.states, key=lambda state: _rank(state.status))[:fitting]:
            contended = " contended" if state.contended else ""
            where = state.attempts[-1].slot if state.status == "running" and state.attempts else ""
            status = Text(printable(state.status) + contended, _STYLES.get(state.status, "red"))
            far = Text(self.far(state), no_wrap=True, overflow="ellipsis")
            table.add_row(Text(state.id), status, Text(printable(where)), far)
        return Group(table) if self.ended else Group(table, summary(self.states))

    def far(self, state: State) -> str:
        """The progress of a training."""
        from elman_bench.jobs.outcome import figures
        from elman_core.extension import progress

        job = self.jobs[state.id]
        if state.status == "ok":
            return figures(job).removeprefix(", ")
        now = progress(job.run) if job.run is not None and state.status == "running" else None
        if now is None:
            return ""
        length = self.lengths.get(state.id)
        left = None
        step = f"step {now.step}, {now.seconds / 60:.1f} min"
        if length is not None and length.steps:
            step = f"step {now.step}/{length.steps}"
            left = now.seconds * (length.steps / now.step - 1)
        elif length is not None and length.minutes:
            left = 60 * length.minutes - now.seconds
        ends = f"  {max(0.0, left) / 60:.1f} min left" if left is not None else ""
        scored = f"  {now.bits_per_byte:.4f} bits per byte" if now.bits_per_byte is not None else ""
        loss = "–" if math.isnan(now.loss) else f"{now.loss:.4f}"  # no target of the last steps counts
        return f"{step}{ends}  loss {loss} nats  {now.tok_s:,.0f} tok/s{scored}"


def summary(states: Sequence[State]) -> str:
    """ "2 running, 3 waiting, 5 ok"."""
    counts = Counter(state.status.partition("@")[0] for state in states)
    return ", ".join(f"{counts[status]} {status}" for status in sorted(counts, key=_rank))


def _rank(status: str) -> int:
    """Its place in tables; a status of another version comes first."""
    kind = status.partition("@")[0]
    return _ORDER.index(kind) if kind in _ORDER else -1
