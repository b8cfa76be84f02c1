"""How a process leaves the other ranks: connections close in an order that cannot hang, and within a time limit."""

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
"""Seconds that libraries may take to close their connections; they normally need less than one."""


class Held(Protocol):
    """An object that holds collective operations."""

    def release(self) -> None:
        """Release them."""


class Holdings:
    """All objects that hold collective operations and must release them before the ranks disconnect.

    NCCL closes or aborts a communicator only after every CUDA graph with one of its operations is destroyed, and waits for that
    without a limit (`commDestroySync` in its src/init.cc, version 2.28).
    """

    def __init__(self) -> None:
        self._held: WeakSet[Held] = WeakSet()

    def add(self, held: Held) -> None:
        """Register `held`, without keeping it alive."""
        self._held.add(held)

    def release(self, wait: bool) -> None:
        """Release all. `wait`: first let the device finish, which never happens if a rank it waits for is gone."""
        if wait and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        for held in list(self._held):
            held.release()
        self._held.clear()


@contextmanager
def in_time(code: int, seconds: float = PARTING, leave: Callable[[int], object] = os._exit) -> Iterator[None]:
    """End the process with exit code `code` if the block, in which a library disconnects, takes longer than `seconds`."""
    over = threading.Event()

    def watch() -> None:
        if not over.wait(seconds):
            log.error("elman: connections to the other ranks did not close within %.0f s; exiting anyway", seconds)
            sys.stdout.flush()
            leave(code)

    threading.Thread(target=watch, name="elman-shutdown", daemon=True).start()
    try:
        yield
    finally:
        over.set()
