"""Stamps: what was verified on this machine, and with what result.

A stamp is a JSON file in the cache, `verified/NAME-TARGET-ARCH-KEY.json`. Its key covers everything that decides a result: the
kernel's sources and build flags, the reference, the Python that calls the kernel, the architecture, torch and CUDA. When one of
these changes, the stamp is no longer found.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from elman_core.registry.errors import KernelError
from elman_core.storage import write_text

from . import build
from .spec import Case, KernelSpec, Target
from .verify import Report


@dataclass(frozen=True)
class Stamp:
    """The last verification of a kernel, as in `elman show` and a run's manifest.

    Attributes:
        grid: "quick", "full", or "none" with ELMAN_VERIFY=skip.
        cases: how many ran. dtypes: their dtypes.
        worst: error / limit of the worst case for each dtype and tensor: {"bfloat16 d w": 0.4}.
        faults: what failed, beside errors above their limits.
        extra: problems verified at their first use, in addition to the grid.
        when: UTC.
    """

    name: str
    target: Target
    arch: str
    passed: bool
    grid: str
    cases: int
    dtypes: tuple[str, ...]
    worst: dict[str, float]
    faults: tuple[str, ...]
    extra: tuple[str, ...]
    torch: str
    cuda: str
    device: str
    when: str


def stamp(spec: KernelSpec, target: Target = "cuda", arch: str | None = None) -> Stamp | None:
    """The stamp of the kernel in its present state on this machine; None without a verification, a kernel or a GPU."""
    if target not in spec.targets or (target == "cuda" and arch is None and not torch.cuda.is_available()):
        return None
    path = _path(spec, target, arch or build.local_arch(spec.extension(target)))
    for folder in build.cache_dirs():
        with contextlib.suppress(OSError, ValueError, TypeError):  # absent, or written by another version: not verified
            read: dict[str, Any] = json.loads((folder / path).read_text())
            values: Any = {k: tuple(v) if isinstance(v, list) else v for k, v in read.items()}
            return Stamp(**values)
    return None


def save(spec: KernelSpec, made: Stamp) -> None:
    """Write a stamp of this kernel.

    Raises:
        KernelError: no cache folder is writable.
        StorageError: the file cannot be written.
    """
    path = build.writable_cache() / _path(spec, made.target, made.arch)
    path.parent.mkdir(exist_ok=True)
    write_text(path, json.dumps(asdict(made), indent=1))


def make(spec: KernelSpec, report: Report, extra: Sequence[Case] = ()) -> Stamp:
    """The stamp of a report. It replaces the existing stamp; a report of single problems (`extra`) is added to it instead.

    Raises:
        KernelError: the report is not of a compiled kernel.
    """
    if report.target not in spec.targets:
        raise KernelError(f"only compiled kernels are stamped, not the back end {report.target!r}")
    arch = build.local_arch(spec.extension(report.target))
    made = Stamp(
        name=spec.name,
        target=report.target,
        arch=arch,
        passed=report.passed,
        grid=report.grid,
        cases=report.cases,
        dtypes=tuple(sorted({row.dtype for row in report.rows})),
        worst={f"{row.dtype} {row.tensor}": round(row.ratio, 4) for row in report.worst()},
        faults=tuple(report.faults),
        extra=tuple(map(str, extra)),
        torch=torch.__version__,
        cuda=torch.version.cuda or "none",
        device=torch.cuda.get_device_name() if report.target == "cuda" else build.toolchain.host_architecture(),
        when=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    there = stamp(spec, report.target, arch)
    if there is None:
        return made
    made = replace(made, extra=there.extra + made.extra)
    if not extra:
        return made
    return replace(
        made,
        passed=made.passed and there.passed,
        grid=there.grid,
        cases=made.cases + there.cases,
        dtypes=tuple(sorted({*made.dtypes, *there.dtypes})),
        worst={k: max(s.worst.get(k, 0.0) for s in (made, there)) for k in (there.worst | made.worst)},
        faults=made.faults + there.faults,
    )


def _path(spec: KernelSpec, target: Target, arch: str) -> Path:
    digest = hashlib.sha256()
    for part in (spec.extension(target).key(arch), torch.__version__, str(torch.version.cuda)):
        digest.update(part.encode() + b"\0")
    record = () if spec.record is None or not spec.record.is_file() else (spec.record,)  # it sets limits
    for path in (*spec.python, *record):
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return Path("verified") / f"{spec.name}-{target}-{arch}-{digest.hexdigest()[:20]}.json"
