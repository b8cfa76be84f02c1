"""The output of a training: a progress bar on a terminal, plain lines elsewhere. Everything except the bar also goes to
console.log."""

from __future__ import annotations

import itertools
import os
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from elman_core.registry.errors import printable

WIDE = 100
"""Columns of a terminal whose progress bar leaves room for every figure."""
LOSSES = ("loss", "bits_per_byte")


class _Unfailing:
    """A stream that may fail: its reader has gone (`elman train … | head`), the terminal was closed, or the disk of a log is
    full. The training continues without output; console.log keeps every line."""

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
            os.dup2(nowhere, self._file.fileno())  # buffered text goes there too
            os.close(nowhere)


class Display:
    """The output of one run. `log` is called with every line; `quiet` shows none."""

    def __init__(self, log: Callable[[str], None], console: Console | None = None, quiet: bool = False) -> None:
        self.log = log
        self.console = console or Console(file=cast(IO[str], _Unfailing(sys.stdout)), quiet=quiet, highlight=False)
        self.bar: Progress | None = None
        self.task: Any = None
        self.smooth: dict[str, float] = {}

    def say(self, text: str, indent: int = 2) -> None:
        """Show and log a line. A terminal breaks it between words and indents what follows; other readers get it whole."""
        self.log(text)
        if self.console.is_terminal:
            wrapper = textwrap.TextWrapper(
                self.console.width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
            )
            text = wrapper.fill(text)
        self.console.print(Text(printable(text, "\n")), soft_wrap=True)

    @contextmanager
    def progress(self, total: float, done: float, step: int) -> Iterator[None]:
        """Inside, `step` moves a progress bar if this is a terminal. `total`, `done`: steps or seconds."""
        if not self.console.is_terminal or self.console.quiet:
            yield
            return

        def text(form: str) -> TextColumn:
            return TextColumn(form, table_column=Column(no_wrap=True))

        bar = BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=10))
        columns = (
            text("{task.description}"), bar, text("{task.percentage:>3.0f}%"), text("{task.fields[figures]}"),
            TimeElapsedColumn(Column(no_wrap=True)), text("left"), TimeRemainingColumn(table_column=Column(no_wrap=True)),
        )  # fmt: skip
        with Progress(*columns, console=self.console, expand=True) as self.bar:
            self.task = self.bar.add_task(f"step {step}", total=total, completed=int(done), figures="")
            try:
                yield
            finally:
                self.bar.refresh()
                self.bar, self.task = None, None

    def step(self, metrics: Mapping[str, float], done: float, every: int, last: bool) -> None:
        """Report an optimizer step. `done`: steps or seconds so far; `every`: steps between lines; `last`: of the training."""
        step = int(metrics["step"])
        if not metrics.get("counted", 1):  # a step without a target that counts has no loss
            metrics = {name: value for name, value in metrics.items() if name not in LOSSES}
        now = {name: metrics[name] for name in LOSSES if name in metrics}
        self.smooth |= {name: 0.95 * self.smooth.get(name, value) + 0.05 * value for name, value in now.items()}
        if self.bar is not None:
            figures = _figures({**metrics, **self.smooth}, short=self.console.width < WIDE)
            self.bar.update(self.task, completed=done, description=f"step {step}", figures=figures)
        if step == 1 or step % every == 0 or last:
            line = f"step {step}  {_figures(metrics)}  lr {metrics['lr']:.2e}  norm {metrics['grad_norm']:.3g}"
            if self.bar is None:
                self.say(line)
            else:
                self.log(line)

    def evaluating(self, batches: Sequence[int]) -> Iterator[int]:
        """The batches of an evaluation, counted by a bar that stands in place of that of the steps meanwhile."""
        if (bar := self.bar) is None:
            yield from batches
            return
        bar.update(self.task, visible=False)
        own = bar.add_task("evaluating", total=len(batches), figures=f"0 of {len(batches)}")
        try:
            for done, batch in enumerate(batches, 1):
                yield batch
                bar.update(own, completed=done, figures=f"{done} of {len(batches)}")
        finally:
            bar.remove_task(own)
            bar.update(self.task, visible=True)

    def evaluation(self, result: Mapping[str, float]) -> None:
        self.say(
            f"held out at step {result['step']}: {result['bits_per_byte']:.4f} bits per byte "
            f"(loss {result['loss']:.4f}, {result['bytes']:,} bytes)"
        )

    def saved(self, path: Path) -> None:
        self.log(f"saved {path}")

    def end(self, run: Path, step: int, status: str, result: Mapping[str, Any], model: Path | None) -> None:
        """The last line. `run`: its folder. model: the last checkpoint."""
        if status != "ok":
            self.say(f"stopped at step {step}, saved; continue with: elman resume {shlex.quote(str(run))}")
        elif step == 0:
            self.say(f"no steps were asked for; the untrained model is in {run}")
        else:
            self.say(f"done: {step} steps, {_summary(result, step)}; the model is {model or run}")


def backends(model: Any) -> list[str]:
    """Return the back end of each layer's recurrence, equal neighbours joined: `layers 0-5 X: reference`.

    Layers without a recurrence are left out: `layers 0, 2, 4 Attention: sdpa`.
    """
    named: list[tuple[str, int]] = []
    for i, block in enumerate(model.model.layers):
        backend = block.mixer.backend()
        if backend:
            named.append((f"{type(block.mixer).__name__}: {backend}", i))
    runs = itertools.groupby(named, key=lambda pair: pair[0])
    return [f"{layers_in_words([i for _, i in run])} {name}" for name, run in runs]


def layers_in_words(numbers: Sequence[int]) -> str:
    """`layer 3`, `layers 0-5`, `layers 0, 2, … 28`."""
    first, last = numbers[0], numbers[-1]
    if first == last:
        return f"layer {first}"
    steps = {b - a for a, b in itertools.pairwise(numbers)}
    if steps == {1}:
        return f"layers {first}-{last}"
    if len(steps) == 1 and len(numbers) > 3:
        return f"layers {first}, {numbers[1]}, … {last}"
    return f"layers {', '.join(map(str, numbers))}"


def _figures(metrics: Mapping[str, float], short: bool = False) -> str:
    loss = f"{metrics['loss']:.4f}" if "loss" in metrics else "–"
    bits = f"{metrics['bits_per_byte']:.3f}" if "bits_per_byte" in metrics else "–"
    figures = f"{bits} bpb  {metrics['tok_s']:,.0f} tok/s"
    return figures if short else f"loss {loss}  {figures}  {metrics['memory'] / 2**30:.2f} GiB"


def _summary(result: Mapping[str, Any], steps: int) -> str:
    parts = []
    if "bits_per_byte" in result:
        parts.append(f"{result['bits_per_byte']:.4f} bits per byte held out")
    if "loss_last_100_steps" in result:
        parts.append(f"loss {result['loss_last_100_steps']:.4f} over the last {min(100, steps)} steps")
    if "tok_s" in result:
        parts.append(f"{result['tok_s']:,.0f} tok/s")
    return ", ".join(parts)
