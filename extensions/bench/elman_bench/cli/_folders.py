"""Names of new folders."""

from __future__ import annotations

import itertools
from pathlib import Path


def free_folder(name: str) -> Path:
    """`runs/NAME`, or with the first number that is free."""
    path = Path("runs") / name
    for number in itertools.count(2):
        if not path.exists():
            break
        path = Path("runs") / f"{name}-{number}"
    return path
