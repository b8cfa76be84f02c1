"""Measures memory and speed of a few steps of the real `Trainer`, and finds the largest batch that fits.

Each measurement has its own process, so that running out of memory has no effect on the next one.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from elman_core.extension import ElmanError, OutOfMemoryError, Settings, errors

from .jobs.job import PYTHON
from .measure import Measurement, Probe

MOST_ROWS = 1 << 16
_MEASURE = "elman_bench.measure"


@dataclass(frozen=True)
class Largest:
    """The largest batch that fits.

    Attributes:
        rows: batch size, without accumulation. probe: measured with it. tried: for each batch size "fits" or the error.
        limited_by: why no larger batch was chosen.
    """

    rows: int
    probe: Probe
    tried: dict[int, str]
    limited_by: str


def probe(settings: Settings, seconds: float = 3.0) -> Probe:
    """Measure a training with these settings in its own process.

    Args:
        seconds: for the timed steps, of which there are at least three (one if a step on a CPU takes over 10 seconds).

    Raises:
        OutOfMemoryError: it does not fit. ElmanError: any other error of the training.
    """
    asked = {"settings": settings.to_dict(), "seconds": seconds}
    with tempfile.TemporaryDirectory(prefix="elman-probe-") as folder:
        answer = Path(folder) / "answer.json"
        code, said = _run([*PYTHON, "-m", _MEASURE, str(answer)], json.dumps({**asked, "folder": folder}))
        if not answer.exists():
            raise _death(code, said, settings)
        tree = json.loads(answer.read_text(encoding="utf-8"))
    if "error" in tree:
        kind = getattr(errors, tree["kind"], ElmanError)
        raise kind(tree["error"])
    return Probe(**{**tree, "measurement": Measurement(**tree["measurement"])})


def largest(
    settings: Settings,
    first: Probe | None = None,
    seconds: float = 3.0,
    say: Callable[[str], None] = lambda _: None,
) -> Largest:
    """The largest `train.batch_size` without accumulation that trains here, to within 3 %, by doubling and bisection.

    Args:
        first: a probe of `settings`, if there is one. say: called with a line for each attempt.

    Raises:
        OutOfMemoryError: not even one row fits. ElmanError: it does not train at all.
    """
    tried: dict[int, str] = {}
    why = f"{MOST_ROWS} rows are the most that are tried"
    good, bad = 0, MOST_ROWS + 1
    rows = settings.train.batch_size
    if first is not None and settings.train.accumulate == 1:
        good = rows
        tried[rows] = "fits"
        rows = min(2 * rows, MOST_ROWS)
    while bad - good > max(1, good // 32):
        try:
            probe(_with_rows(settings, rows), 0.0)
        except ElmanError as error:
            if rows == 1:
                raise
            bad = rows
            why = "memory" if isinstance(error, OutOfMemoryError) else str(error)
            tried[rows] = "out of memory" if isinstance(error, OutOfMemoryError) else str(error)
        else:
            good = rows
            tried[rows] = "fits"
        say(f"batch {rows}: {tried[rows]}")
        rows = min(2 * good, MOST_ROWS) if bad > MOST_ROWS else (good + bad) // 2
    while True:  # a batch that fits for a few steps may not fit for more
        try:
            return Largest(good, probe(_with_rows(settings, good), seconds), tried, why)
        except OutOfMemoryError:
            if good == 1:
                raise
            tried[good] = "out of memory"
            why = "memory"
            say(f"batch {good}: out of memory in later steps")
            good -= max(1, good // 32)


def _with_rows(settings: Settings, rows: int) -> Settings:
    return dataclasses.replace(settings, train=dataclasses.replace(settings.train, batch_size=rows, accumulate=1))


def _run(command: list[str], text: str) -> tuple[int, str]:
    """Run a command in its own process group; an interrupt ends the whole group."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        _, said = process.communicate(text)
    except BaseException:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    return process.returncode, said


def _death(code: int, said: str, settings: Settings) -> ElmanError:
    """The error of a measurement that left no answer."""
    if code == -signal.SIGKILL:
        return OutOfMemoryError(f"the system killed the probe at batch {settings.train.batch_size}: out of memory")
    last = said.strip().splitlines()[-1:] or ["no message"]
    return ElmanError(f"the probe's process ended with code {code}: {last[0]}")
