"""The launcher's variables (`torchrun`), and the seconds that the start of this process takes. Needs no torch."""

from __future__ import annotations

import logging
import os
import time

import psutil

from elman_core.registry.errors import ConfigError

log = logging.getLogger("elman_core")

_reached: dict[str, float] = {}


def several() -> bool:
    """Whether a launcher has started other processes too."""
    return "RANK" in os.environ and place()[1] > 1


def hush() -> None:
    """Call before importing torch: silences the pages of warnings that torch prints when another rank disappears."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def place() -> tuple[int, int, int]:
    """Rank, number of ranks, and rank on this machine; (0, 1, 0) without a launcher.
    Raises `ConfigError` if the launcher's variables are not numbers, or contradict each other."""
    values = [
        os.environ.get(name, default) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))
    ]
    try:
        rank, size, local = map(int, values)
    except ValueError:
        rank, size, local = -1, 0, 0
    if not 0 <= rank < size:
        raise ConfigError(f"RANK, WORLD_SIZE and LOCAL_RANK are {', '.join(values)}: start processes with torchrun")
    return rank, size, local


def reached(phase: str) -> dict[str, float]:
    """Record that this process reached `phase`; if `ELMAN_PHASES` is set, every rank logs it. Returns the seconds from the
    start of the process to each phase reached so far."""
    seconds = round(time.time() - psutil.Process().create_time(), 2)
    _reached[phase] = seconds
    if os.environ.get("ELMAN_PHASES"):
        log.warning("elman: rank %d: %s after %.1f s", place()[0], phase, seconds)
    return dict(_reached)
