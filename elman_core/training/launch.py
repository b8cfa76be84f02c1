"""Whether this process was started as one of several, as `torchrun` does. Needs no torch."""

from __future__ import annotations

import os

from elman_core.registry.errors import ConfigError


def several() -> bool:
    """Whether a launcher says that there are other processes."""
    return "RANK" in os.environ and place()[1] > 1


def hush() -> None:
    """Before torch is imported: of a rank that is gone its libraries would otherwise warn for pages, besides the error."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def place() -> tuple[int, int, int]:
    """Rank, number of ranks, and rank on this machine; (0, 1, 0) without a launcher.

    Raises:
        ConfigError: the launcher's variables are not numbers, or contradict each other.
    """
    found = [
        os.environ.get(name, default) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))
    ]
    try:
        rank, size, local = map(int, found)
    except ValueError:
        rank, size, local = -1, 0, 0
    if not 0 <= rank < size:
        raise ConfigError(
            f"RANK, WORLD_SIZE and LOCAL_RANK are {', '.join(found)}: start several processes with torchrun"
        )
    return rank, size, local
