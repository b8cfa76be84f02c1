"""What other programs say of the machine and of the tree, for the facts beside a result."""

from __future__ import annotations

import subprocess
from pathlib import Path

HERE = Path(__file__).parent


def said(*command: str) -> str:
    """The output of a command, or "unknown"."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=HERE).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
