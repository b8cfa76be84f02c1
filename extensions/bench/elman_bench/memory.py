"""How much memory this machine has left, and how much a process has taken."""

from __future__ import annotations

import math
import os
from pathlib import Path


def available(cgroup: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process may still take: the free memory of the machine, or less if a control group (v2) limits it."""
    import psutil

    left: list[float] = [psutil.virtual_memory().available]
    try:
        name = cgroup.read_text(encoding="utf-8").splitlines()[-1].rpartition(":")[2]
    except (OSError, IndexError):
        return int(left[0])
    inner = root / name.strip("/")
    left += [_left(group) for group in (inner, *inner.parents) if group == root or root in group.parents]
    return int(max(0, min(left)))


def resident() -> int:
    """The most bytes of memory that this process has had at one time."""
    try:  # not ru_maxrss, which counts what the parent had
        return 1024 * int(Path("/proc/self/status").read_text(encoding="utf-8").partition("VmHWM:")[2].split()[0])
    except (OSError, IndexError):
        import resource

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if os.uname().sysname == "Darwin" else 1024 * most


def _left(group: Path) -> float:
    """Bytes that a control group may still take. Its file cache does not count: it is given up when memory runs short."""
    try:
        most = (group / "memory.max").read_text(encoding="utf-8").strip()
        used = int((group / "memory.current").read_text(encoding="utf-8"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text(encoding="utf-8").splitlines())
        return math.inf if most == "max" else int(most) - used + int(stat.get("inactive_file", 0))
    except (OSError, ValueError):
        return math.inf
