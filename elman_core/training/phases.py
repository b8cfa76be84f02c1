"""Where a start spends its time: what a process has come to, in seconds since it began."""

from __future__ import annotations

import logging
import os
import time

import psutil

from .launch import place

log = logging.getLogger("elman_core")

_reached: dict[str, float] = {}


def reached(phase: str) -> dict[str, float]:
    """This process has come to `phase`, which it says if `ELMAN_PHASES` is set, on every rank.

    Returns:
        All phases that it has come to, each with the seconds since the process began.
    """
    seconds = round(time.time() - psutil.Process().create_time(), 2)
    _reached[phase] = seconds
    if os.environ.get("ELMAN_PHASES"):
        log.warning("elman: rank %d: %s after %.1f s", place()[0], phase, seconds)
    return dict(_reached)
