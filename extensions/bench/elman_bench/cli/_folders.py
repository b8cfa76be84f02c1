"""Names of new folders."""

from __future__ import annotations

import itertools
from pathlib import Path


def free_folder(name: str) -> Path:
    """`runs/NAME`, or with the first number that is free."""
    names = (Path("runs") / f"{name}{f'-{i}' if i > 1 else ''}" for i in itertools.count(1))
    return next(path for path in names if not path.exists())
