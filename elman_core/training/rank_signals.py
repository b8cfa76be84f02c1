"""Interruptions from outside: signals, and the messages about them that ranks exchange with every step.

SIGINT, SIGTERM and SIGHUP end the run after saving; SIGUSR1 saves and continues. Each rank adds its messages to the sum that
averages the loss, which costs nothing, so all ranks stop, save and end a schedule at the same step.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from elman_core.model.graph import HostCopy

from .ranks.group import Ranks, timeout
from .step import OneProcess

ENDING = tuple(s for s in (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", None)) if s is not None)
SAVE_NOW = getattr(signal, "SIGUSR1", None)  # Windows has none
AGAIN = 0.5
"""Seconds within which a second SIGINT is the same Ctrl-C: terminals send it to all processes, and launchers forward it."""

SLACK = 10.0
"""Seconds added to the ranks' time limit, so that operations with a limit of their own, which report more, fail first."""


@dataclass
class Received:
    """Signals received so far: the first that ends the run, or 0, and whether a checkpoint is wanted now."""

    ending: int = 0
    save: bool = False


@contextmanager
def listening(again_interrupts: bool = True) -> Iterator[Received]:
    """Note signals inside the block. SIGHUP stays ignored under `nohup`. If it `again_interrupts`, a second SIGINT, more than
    `AGAIN` after the first, raises `KeyboardInterrupt`: not under a launcher, which may forward one Ctrl-C at any time."""
    received = Received()
    if threading.current_thread() is not threading.main_thread():
        yield received  # only the main thread may handle signals
        return
    interrupts: list[float] = []  # times of SIGINT, by time.monotonic

    def note(signum: int, _frame: Any) -> None:
        if signum == SAVE_NOW:
            received.save = True
            return
        if signum == signal.SIGINT:
            interrupts.append(time.monotonic())
            if again_interrupts and interrupts[-1] - interrupts[0] > AGAIN:
                raise KeyboardInterrupt
        received.ending = received.ending or signum

    before = {s: signal.getsignal(s) for s in (*ENDING, SAVE_NOW) if s is not None}
    ignored = {s for s in before if s not in (signal.SIGINT, signal.SIGTERM) and before[s] is signal.SIG_IGN}
    for s in before.keys() - ignored:
        signal.signal(s, note)
    try:
        yield received
    finally:
        for s in before.keys() - ignored:
            # A handler that was not set from Python cannot be restored: it was the default or the launcher's own.
            signal.signal(s, signal.SIG_DFL if before[s] is None else before[s])


class RankSignals:
    """Signals, the first rank's clock and failures on one rank, known to all ranks after the step that carries them.

    A single process needs no messages: it knows at once.

    Attributes:
        received: this process's signals; replaced when it starts to listen.
        failure: an error on this rank between two steps, which is to end all ranks.
    """

    def __init__(self, ranks: Ranks, processes: OneProcess, seconds: float = 0.0) -> None:
        self.ranks, self.processes = ranks, processes
        self.received = Received()
        self.failure: Exception | None = None
        self._over = False
        self._last_beat = time.monotonic()
        self._seconds = seconds  # by the first rank's clock
        self._ending: set[int] = set()  # the signals that ranks have told of
        self._saves = False

    @property
    def alone(self) -> bool:
        return self.ranks.size == 1

    def tell(self, seconds: float) -> None:
        """Before a step: what to send with it. `seconds`: training time by this rank's clock."""
        if self.alone:
            return
        signals = [float(self.received.ending == s) for s in ENDING]
        save = self.received.save
        self.received.save = False
        self.processes.tell([seconds * self.ranks.main, *signals, float(save), float(self.failure is not None)])

    def sent(self) -> HostCopy | None:
        """After a step was launched: its messages, on their way to the host."""
        return None if self.alone else HostCopy.of(self.processes.heard)

    def hear(self, messages: HostCopy | None) -> None:
        """After the values of that step were read: process what `sent` returned.
        Raises on every rank if something failed on any between two steps."""
        self.beat()
        if messages is None:
            return
        self._seconds, *signals, save, failed = messages.read()[: len(ENDING) + 3]
        self._ending.update(signum for signum, told in zip(ENDING, signals, strict=True) if told)
        self._saves = self._saves or bool(save)
        if failed and not self._over:  # steps under way repeat it
            self._over = True
            self.settle()

    def settle(self) -> None:
        """Raise on every rank what failed on any."""
        self.ranks.settle(self.failure)

    @contextmanager
    def by_one(self) -> Iterator[None]:
        """Surrounds work of the first rank only: its failure reaches the others with the next step and ends all ranks."""
        try:
            yield
        except Exception as error:
            if self.alone:
                raise
            self.failure = self.failure or error

    @property
    def ending(self) -> int:
        """The signal that ends the run, or 0."""
        if self.alone:
            return self.received.ending
        return next((int(signum) for signum in ENDING if signum in self._ending), 0)

    def asked_to_end(self) -> bool:
        """Whether a signal ends the run: asked between the batches of an evaluation, each of which is progress."""
        self.beat()
        return bool(self.ending)

    def saves(self) -> bool:
        """Whether a checkpoint is wanted now; asking clears the request."""
        if self.alone:
            wanted = self.received.save
            self.received.save = False
        else:
            wanted = self._saves
            self._saves = False
        return wanted

    def clock(self, seconds: float) -> float:
        """Training time by which all ranks decide: the first rank's, as of the last step; `seconds` for a single process."""
        return seconds if self.alone else self._seconds

    def beat(self) -> None:
        """Record progress, for `watched`."""
        self._last_beat = time.monotonic()

    @contextmanager
    def watched(self, stalled: Callable[[float], Any], early: bool = False) -> Iterator[None]:
        """Inside, a thread calls `stalled` with the limit in seconds once nothing has progressed for longer than ranks wait.

        Collective operations have a time limit, but not those recorded in a CUDA graph, which NCCL's watchdog does not see.
        `early`: call before the ranks' limit, at which NCCL aborts the process; gloo raises an error instead.
        """
        if self.alone:
            yield
            return
        over = threading.Event()
        limit = timeout().total_seconds()
        limit = 0.9 * limit if early else 1.1 * limit + SLACK

        def watch() -> None:
            while not over.wait(min(1.0, limit / 10)):
                if time.monotonic() - self._last_beat > limit:
                    stalled(limit)
                    return

        self.beat()
        thread = threading.Thread(target=watch, name="elman-watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(timeout=5)
