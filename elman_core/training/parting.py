"""The end of a process among several: connections are closed in an order that ends, and within a time."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol
from weakref import WeakSet

import torch

log = logging.getLogger("elman_core")

PARTING = 60.0
"""Seconds that libraries may take to close their connections; they need less than one."""


class Held(Protocol):
    """What holds operations that several processes share."""

    def release(self) -> None:
        """Give them up."""


class Holdings:
    """Whatever holds operations of the libraries that connect processes, and has to give them up before those part.

    NCCL closes a communicator only when every CUDA graph that holds one of its operations is destroyed, and waits for that
    without an end (`commDestroySync` in its src/init.cc, version 2.28; to abort it waits likewise).
    """

    def __init__(self) -> None:
        self._held: WeakSet[Held] = WeakSet()

    def add(self, held: Held) -> None:
        """Remember it for as long as others do."""
        self._held.add(held)

    def release(self, wait: bool) -> None:
        """Give all of it up. `wait`: until the device has done what was under way, which a rank that is gone may be part of."""
        if wait and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        for held in list(self._held):
            held.release()
        self._held.clear()


@contextmanager
def in_time(code: int, seconds: float = PARTING, leave: Callable[[int], object] = os._exit) -> Iterator[None]:
    """Inside, a library closes its connections. If that takes longer than `seconds`, say so and end the process with `code`."""
    over = threading.Event()

    def watch() -> None:
        if not over.wait(seconds):
            log.error("elman: the connections to the other ranks did not close within %.0f s: left without", seconds)
            sys.stdout.flush()
            leave(code)

    threading.Thread(target=watch, name="elman-parting", daemon=True).start()
    try:
        yield
    finally:
        over.set()
