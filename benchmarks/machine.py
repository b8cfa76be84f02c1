"""What other programs say of the machine and of the tree, for the facts beside a result."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def said(*command: str) -> str:
    """The output of a command, or "unknown"."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=HERE).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def commit() -> str:
    """Of the tree, where git knows it; what --commit says otherwise."""
    return said("git", "rev-parse", "--short=12", "HEAD")


def under_load(step: Callable[[], object]) -> dict[str, str]:
    """Clocks, power, and why the driver holds clocks back, asked while the GPU works; nothing without a driver to ask."""
    wanted = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "clocks_event_reasons.active")
    try:
        asked = subprocess.Popen(
            ["nvidia-smi", f"--query-gpu={','.join(wanted)}", "--format=csv,noheader", "-i", "0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    except OSError:
        return {}
    step()
    while asked.poll() is None:
        step()
    said_of_it = asked.communicate()[0].strip()
    return dict(zip(wanted, said_of_it.split(", "), strict=True)) if asked.returncode == 0 else {}


def facts(tree: str) -> dict[str, Any]:
    """The GPU, what is installed, the commit (`tree`), and when."""
    import torch

    versions: dict[str, str | None] = {}
    for package in (
        "torch", "triton", "transformers", "mamba-ssm", "causal-conv1d", "fla-core", "flashrnn", "pararnn-torch",
    ):  # fmt: skip
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "driver": said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0"),
        "clocks": said("nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,power.draw", "--format=csv,noheader", "-i", "0"),
        "python": platform.python_version(),
        "versions": versions,
        "commit": tree,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
    }
