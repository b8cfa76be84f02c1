"""How a process leaves the other ranks: connections close in an order that cannot hang, and within a time limit."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger("elman_core")

PARTING = 60.0
"""Seconds that libraries may take to close their connections; they normally need less than one."""


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
