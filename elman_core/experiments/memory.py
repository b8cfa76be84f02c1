"""How much memory a training may take here, and a limit that makes it fail instead of the machine."""

from __future__ import annotations

import os
import re
from pathlib import Path

from elman_core.registry.errors import ConfigError


def parse_bytes(text: str) -> int:
    """ "8G", "8GiB" and "8192M" are 2**33 bytes, as in the tools of the system. Raises `ConfigError` for anything else."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if not found or not float(found[1]):
        raise ConfigError(f"an amount of memory is written 8G, 500M or a number of bytes, not {text!r}")
    return int(float(found[1]) * 1024 ** " kmgt".index(found[2] or " "))


def available(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that this process may still take: what the machine has free, or less if a control group limits it.

    None where the system does not say.
    """
    free = _machine(proc)
    limits = [left for left in (_left(folder) for folder in _groups(proc, cgroups)) if left is not None]
    known = [n for n in (free, *limits) if n is not None]
    return max(0, min(known)) if known else None


def resident() -> int:
    """The most bytes of memory that this process has had at one time."""
    try:
        return _field(Path("/proc/self/status"), "VmHWM") or 0  # not ru_maxrss, which counts what the parent had
    except OSError:
        import resource

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if os.uname().sysname == "Darwin" else 1024 * most


def limit(more: int) -> None:
    """Let this process allocate `more` bytes beyond what it has; then allocation fails. Does nothing but on Linux."""
    try:
        import resource

        now = _field(Path("/proc/self/status"), "VmData") or 0
    except (ImportError, OSError):
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = now + more if hard == resource.RLIM_INFINITY else min(now + more, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))


def _machine(proc: Path) -> int | None:
    try:
        return _field(proc / "meminfo", "MemAvailable")
    except OSError:
        try:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
        except (OSError, ValueError):
            return None


def _groups(proc: Path, cgroups: Path) -> list[Path]:
    """The folders of this process's control group and of those around it: each may have a limit (v2, and v1's memory)."""
    try:
        lines = (proc / "self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = cgroups / "memory" if controllers else cgroups
        inner = root / path.strip("/")
        folders += [f for f in (inner, *inner.parents) if f == root or root in f.parents]
    return folders


def _left(group: Path) -> int | None:
    """What a control group may still take. Its file cache does not count: it is given up when memory runs short."""
    for most, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        try:
            text = (group / most).read_text(encoding="utf-8").strip()
            if text == "max" or int(text) >= 1 << 60:
                return None
            cache = 0
            for line in (group / "memory.stat").read_text(encoding="utf-8").splitlines():
                if line.split()[0] in ("inactive_file", "total_inactive_file"):
                    cache = int(line.split()[1])
            return int(text) - (int((group / used).read_text(encoding="utf-8")) - cache)
        except (OSError, ValueError):
            continue
    return None


def _field(path: Path, name: str) -> int | None:
    """A line like `MemAvailable:  12 kB` of a file, in bytes."""
    found = re.search(rf"^{name}:\s+(\d+) kB", path.read_text(encoding="utf-8"), re.MULTILINE)
    return 1024 * int(found[1]) if found else None
