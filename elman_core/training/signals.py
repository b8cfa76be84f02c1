"""Signals during a training: noted, and acted upon between two steps.

SIGINT, SIGTERM and SIGHUP end the run after saving; SIGUSR1 saves and goes on.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

ENDING = tuple(s for s in (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", None)) if s is not None)
SAVE_NOW = getattr(signal, "SIGUSR1", None)  # Windows has none
AGAIN = 0.5
"""Seconds within which a second SIGINT is the same Ctrl-C: a terminal sends it to all, and some launchers pass it on too."""


@dataclass
class Received:
    """What has been asked for.

    Attributes:
        ending: the first signal that ends the run, or 0. save: whether a checkpoint is wanted now.
    """

    ending: int = 0
    save: bool = field(default=False)


@contextmanager
def listening(again_interrupts: bool = True, stuck: Callable[[int], Any] | None = None) -> Iterator[Received]:
    """Inside, signals are noted. SIGHUP stays ignored where `nohup` made it so.

    Args:
        again_interrupts: a second SIGINT, more than `AGAIN` after the first, raises `KeyboardInterrupt`. Not under a launcher
            that passes one Ctrl-C on at any later time.
        stuck: called from another thread with an ending signal that the training has not noticed for `PATIENCE` seconds,
            because it waits inside a library for a process that no longer is.
    """
    received = Received()
    if threading.current_thread() is not threading.main_thread():
        yield received  # only the main thread may handle signals
        return

    interrupts: list[float] = []  # when they came, of time.monotonic

    def note(signum: int, _frame: Any) -> None:
        if signum == SAVE_NOW:
            received.save = True
            return
        if signum == signal.SIGINT:
            interrupts.append(time.monotonic())
            if again_interrupts and interrupts[-1] - interrupts[0] > AGAIN:
                raise KeyboardInterrupt
        received.ending = received.ending or signum

    wanted = [s for s in (*ENDING, SAVE_NOW) if s is not None]
    before = {s: signal.getsignal(s) for s in wanted}
    wanted = [s for s in wanted if not (s not in (signal.SIGINT, signal.SIGTERM) and before[s] is signal.SIG_IGN)]
    for s in wanted:
        signal.signal(s, note)
    try:
        with _watched(stuck):
            yield received
    finally:
        for s in wanted:
            # A handler that was not set from Python cannot be put back: it was the default or the launcher's own.
            signal.signal(s, signal.SIG_DFL if before[s] is None else before[s])


PATIENCE = 20.0
"""Seconds; launchers send SIGKILL 30 seconds after SIGTERM."""


@contextmanager
def _watched(stuck: Callable[[int], Any] | None) -> Iterator[None]:
    """A thread that hears of signals even while the main thread is inside a library and runs no Python handler."""
    if stuck is None:
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    over = threading.Event()

    def watch() -> None:
        while heard := os.read(reader, 1):
            if heard[0] in ENDING:
                if not over.wait(PATIENCE):
                    stuck(heard[0])
                return

    thread = threading.Thread(target=watch, name="elman-signals", daemon=True)
    previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread.start()
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(previous)
        os.close(writer)  # ends the thread's read
        thread.join(timeout=1)
        os.close(reader)
