"""What the ranks of a training agree on with every step, so that all stop, save and end a schedule at the same one.

Each adds its notes to the sum that the loss is averaged with, which costs nothing; so a signal that one rank received before a
step is known to all after it. One process alone needs no round: it knows at once.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from elman_core.model.graph import Sent

from .distributed import Ranks, timeout
from .signals import ENDING, Received
from .step import OneProcess

SLACK = 10.0
"""Seconds more than ranks wait for each other in operations that have a limit of their own, which say more."""


class Agreement:
    """Signals, the first rank's clock, and whether what only the first rank does has failed there.

    Args:
        seconds: training time so far.

    Attributes:
        received: where this process's signals are noted; replaced when it begins to listen.
        failure: what failed on this rank between two steps, and is to end all of them.
    """

    def __init__(self, ranks: Ranks, processes: OneProcess, seconds: float = 0.0) -> None:
        self.ranks, self.processes = ranks, processes
        self.received = Received()
        self.failure: Exception | None = None
        self._over = False
        self._last_beat = time.monotonic()
        self._heard = [seconds] + [0.0] * (len(ENDING) + 2)

    @property
    def alone(self) -> bool:
        return self.ranks.size == 1

    def tell(self, seconds: float) -> None:
        """Before a step: hand over what is to be known after it. `seconds` of training so far, by this rank's clock."""
        if self.alone:
            return
        signals = [float(self.received.ending == s) for s in ENDING]
        save, self.received.save = self.received.save, False
        self.processes.tell([seconds * self.ranks.main, *signals, float(save), float(self.failure is not None)])

    def sent(self) -> Sent | None:
        """After a step has been handed to the device: its notes, on their way to the host."""
        if self.alone:
            return None
        return Sent.of(self.processes.heard)

    def hear(self, notes: Sent | None) -> None:
        """After the values of that step have been read: what `sent` gave.

        Raises:
            ElmanError: on every rank, if something failed on any between two steps.
        """
        self.beat()
        if notes is None:
            return
        seconds, *signals, save, failed = notes.read()[: len(self._heard)]
        ending = [max(a, b) for a, b in zip(signals, self._heard[1:], strict=False)]
        self._heard = [seconds, *ending, save, failed]
        if failed and not self._over:  # told again with the steps that were under way
            self._over = True
            self.settle()

    def beat(self) -> None:
        """Something has moved."""
        self._last_beat = time.monotonic()

    @contextmanager
    def beating(self, silent: Callable[[float], Any], first: bool = False) -> Iterator[None]:
        """Inside, `silent` is called from another thread, with the seconds, when nothing has moved for longer than ranks wait.

        Collective operations have a limit of their own; those that a CUDA graph holds have none.

        Args:
            first: call it before that limit: NCCL ends a process there without a word, while gloo raises an error.
        """
        if self.alone:
            yield
            return
        over, limit = threading.Event(), timeout().total_seconds()
        limit = 0.9 * limit if first else 1.1 * limit + SLACK

        def watch() -> None:
            while not over.wait(min(1.0, limit / 10)):
                if time.monotonic() - self._last_beat > limit:
                    silent(limit)
                    return

        self.beat()
        thread = threading.Thread(target=watch, name="elman-heart", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(timeout=5)

    def settle(self) -> None:
        """Raise on every rank what failed on any."""
        self.ranks.settle(self.failure)

    @contextmanager
    def by_one(self) -> Iterator[None]:
        """Around what only the first rank does: a failure is told to the others with the next step, and ends all after it."""
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
        return next((int(s) for s, heard in zip(ENDING, self._heard[1:], strict=False) if heard), 0)

    def saves(self) -> bool:
        """Whether a checkpoint is wanted now; asking takes the wish back."""
        if self.alone:
            wanted, self.received.save = self.received.save, False
        else:
            wanted, self._heard[-2] = bool(self._heard[-2]), 0.0
        return wanted

    def clock(self, seconds: float) -> float:
        """Seconds of training by which all ranks decide: their first's, as of the last step; `seconds` where there is one."""
        return seconds if self.alone else self._heard[0]


def signal_name(signum: int) -> str:
    """SIGTERM for 15."""
    return signal.Signals(signum).name
