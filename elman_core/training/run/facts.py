"""Facts that a manifest records: the machine, the versions, the commit, the memory in use."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import elman_core


def hardware(device: torch.device) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "host": platform.node(),
        "system": platform.platform(),
        "cpu_threads": torch.get_num_threads(),
        "device": str(device),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "gpu": properties.name,
            "gpu_memory": properties.total_memory,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
        }
    return facts


def git_commit(folder: Path) -> str | None:
    """The commit of the git working tree around `folder`, with "+changes" if there are any; None outside a tree."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
        return done.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "-uno") else "")
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def memory_in_use(device: torch.device) -> int:
    """Peak bytes allocated on a GPU; resident bytes of this process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def versions(requirements: Mapping[str, str]) -> dict[str, str]:
    """Versions of the core, the plugins and the libraries that compute. `requirements`: by variant, `name==version`."""
    names = ("torch", "transformers", "safetensors", "numpy", "schedulefree")
    libraries = {name: metadata.version(name) for name in names}
    return {"elman-core": elman_core.__version__, **dict(r.split("==", 1) for r in requirements.values()), **libraries}
