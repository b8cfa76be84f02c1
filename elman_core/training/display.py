"""What a training says: its first lines, then a progress bar on a terminal and plain lines elsewhere. All of it but the bar
goes to the run's console.log too."""

from __future__ import annotations

import itertools
import json
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

if TYPE_CHECKING:
    from .loop import Trainer


class _Unfailing:
    """A stream to which writing may fail: its reader has left (`elman train … | head`), the terminal was closed, the disk of a
    log is full. The training goes on unseen; console.log keeps every line."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        with self._unseen():
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with self._unseen():
            self._file.flush()

    @contextmanager
    def _unseen(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._file.fileno())  # what is still buffered goes there, too
            os.close(nowhere)


class Display:
    """The voice of one run.

    Args:
        log: called with every line, such as `RunFolder.log`. console: where it is shown. quiet: show nothing.
    """

    def __init__(self, log: Callable[[str], None], console: Console | None = None, quiet: bool = False) -> None:
        self.log = log
        self.console = console or Console(file=cast(IO[str], _Unfailing(sys.stdout)), quiet=quiet, highlight=False)
        self.bar: Progress | None = None
        self.task: Any = None
        self.smooth: float | None = None

    def say(self, text: str) -> None:
        """A line, shown and logged."""
        self.log(text)
        self.console.print(Text(text), soft_wrap=True)

    @contextmanager
    def progress(self, run: Trainer) -> Iterator[None]:
        """Inside, `step` moves a bar if this is a terminal."""
        if not self.console.is_terminal or self.console.quiet:
            yield
            return
        columns = (
            TextColumn("step {task.fields[step]}"),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TextColumn("<"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.console, expand=True) as self.bar:
            self.task = self.bar.add_task("", total=_total(run), completed=int(_done(run)), step=run.step, figures="")
            try:
                yield
            finally:
                self.bar.refresh()
                self.bar, self.task = None, None

    def step(self, run: Trainer, metrics: Mapping[str, float]) -> None:
        """One optimizer step is done."""
        every, step = run.settings.train.log_every, int(metrics["step"])
        loss = metrics["loss"]
        self.smooth = loss if self.smooth is None else 0.95 * self.smooth + 0.05 * loss
        if self.bar is not None:
            figures = _figures({**metrics, "loss": self.smooth})
            self.bar.update(self.task, completed=_done(run), step=step, figures=figures)
        if step == 1 or step % every == 0 or run.finished:
            line = f"step {step}  {_figures(metrics)}  lr {metrics['lr']:.2e}  norm {metrics['grad_norm']:.3g}"
            if self.bar is None:
                self.say(line)
            else:
                self.log(line)

    def evaluation(self, result: Mapping[str, float]) -> None:
        """A held-out evaluation is done."""
        self.say(
            f"held out at step {result['step']}: {result['bits_per_byte']:.4f} bits per byte "
            f"(loss {result['loss']:.4f}, {result['bytes']:,} bytes)"
        )

    def saved(self, path: Path) -> None:
        """A checkpoint is on the disk."""
        self.log(f"saved {path}")

    def end(self, run: Trainer, status: str, result: Mapping[str, Any]) -> None:
        """The last lines."""
        if status != "ok":
            self.say(f"stopped at step {run.step}, saved; continue with: elman resume {shlex.quote(str(run.path))}")
        elif run.step == 0:
            self.say(f"no steps asked for; the untrained model is in {run.path}")
        else:
            self.say(f"done: {run.step} steps, {_summary(result)}; the model is {run.saved[1] or run.path}")


def first_lines(run: Trainer, resumed: bool) -> list[str]:
    """What is known before the first step: settings, size, backends, data, the loss to expect, the schedule."""
    settings, train = run.settings, run.settings.train
    parameters = sum(p.numel() for p in run.model.parameters())
    lines = [f"run         {run.path}" + (f" (resumed at step {run.step})" if resumed else "")]
    for table, values in settings.to_dict().items():
        shown = "  ".join(f"{k}={json.dumps(v)}" for k, v in values.items() if v is not None)
        lines.append(f"{table:12}{shown}")
    held = f", {run.split.heldout_bytes:,} held out" if settings.data.heldout else ", nothing held out"
    lines += [
        f"text        {run.file.size:,} bytes{held}",
        f"parameters  {parameters:,}",
        f"backend     {'; '.join(backends(run.model)) or 'no recurrence'} on {run.device}, {train.precision}",
        f"steps       {run.mode.name} ({run.mode.why})",
        *_ranks(run),
        f"loss        expected at the start: {math.log(run.model.config.vocab_size):.4f} nats per byte "
        f"(ln {run.model.config.vocab_size})",
    ]
    marks = "  ".join(f"{mark} {factor * train.lr:.2e}" for mark, factor in run.schedule.at_landmarks().items())
    lines.append(f"schedule    {train.schedule}, warm-up {train.warmup} steps: {marks}")
    return lines


def _ranks(run: Trainer) -> list[str]:
    facts = run.manifest.get("parallel", {"ranks": 1})
    if facts["ranks"] == 1:
        return []
    rows = run.settings.train.batch_size // facts["ranks"]
    return [f"ranks       {facts['ranks']}, {facts['kind']} over {facts['backend']}: {rows} rows of the batch each"]


def backends(model: Any) -> list[str]:
    """What runs each layer's recurrence, neighbours with the same joined: `layers 0-5 X: reference`.

    A layer without one is left out: `layers 0, 2, 4 Attention: sdpa`.
    """
    mixers = [(i, block.mixer) for i, block in enumerate(model.model.layers)]
    each = [(f"{type(mixer).__name__}: {ran}", i) for i, mixer in mixers if (ran := mixer.backend())]
    return [
        f"{layers_in_words([i for _, i in same])} {name}" for name, same in itertools.groupby(each, key=lambda e: e[0])
    ]


def layers_in_words(numbers: Sequence[int]) -> str:
    """In words: `layer 3`, `layers 0-5`, `layers 0, 2, … 28`."""
    first, last = numbers[0], numbers[-1]
    if first == last:
        return f"layer {first}"
    steps = {b - a for a, b in itertools.pairwise(numbers)}
    if steps == {1}:
        return f"layers {first}-{last}"
    if len(steps) == 1 and len(numbers) > 3:
        return f"layers {first}, {numbers[1]}, … {last}"
    return f"layers {', '.join(map(str, numbers))}"


def _figures(metrics: Mapping[str, float]) -> str:
    loss = metrics["loss"]
    return f"loss {loss:.4f}  {loss / math.log(2):.3f} bpb  {metrics['tok_s']:,.0f} tok/s  {metrics['memory'] / 2**30:.2f} GiB"


def _summary(result: Mapping[str, Any]) -> str:
    parts = []
    if "bits_per_byte" in result:
        parts.append(f"{result['bits_per_byte']:.4f} bits per byte held out")
    if "loss_last_100_steps" in result:
        parts.append(f"loss {result['loss_last_100_steps']:.4f} over the last 100 steps")
        parts.append(f"{result['tok_s']:,.0f} tok/s")
    return ", ".join(parts)


def _total(run: Trainer) -> float:
    train = run.settings.train
    return float(train.steps if train.steps is not None else 60 * (train.minutes or 0))


def _done(run: Trainer) -> float:
    return float(run.step if run.settings.train.steps is not None else run.progress.seconds)
