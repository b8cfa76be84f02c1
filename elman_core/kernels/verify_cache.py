"""Stamps: what was verified on this machine, and with what result. Each size is verified at its first use, in training and in
decoding.

A stamp is a JSON file in the cache, `verified/NAME-TARGET-ARCH-KEY.json`. Its key covers everything that decides a result: the
kernel's sources and build flags, the reference, the Python that calls the kernel, the architecture, torch and CUDA. When one of
these changes, the stamp is no longer found.

`ELMAN_VERIFY=skip` turns the first use's verification off. `used()`, which goes into a run's manifest, then says so.

Recorded errors: the measured distance of each kernel from float64, which limits later verifications. A plugin ships one file
with the worst errors that `elman verify --record` measured on the full grid, JSON:
`{"sm_90": {"device", "torch", "cuda", "errors": {KERNEL: {"bfloat16 d w": 1.9e-3}}}}`.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from elman_core.registry.errors import ConfigError, KernelError, StorageError
from elman_core.storage import now, read_json, storage_errors, write_json

from . import build
from .spec import Case, KernelSpec, Target
from .verify import Report, failures, verify

_log = logging.getLogger("elman_core")
_used: dict[str, Mapping[str, Any]] = {}


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
        with contextlib.suppress(OSError, ValueError, TypeError):  # absent, damaged, of another version: not verified
            found = read_json(folder / path)
            values: Any = {k: tuple(v) if isinstance(v, list) else v for k, v in found.items()}
            return Stamp(**values)
    return None


def save(spec: KernelSpec, report: Report, extra: Sequence[Case] = ()) -> Stamp:
    """Write what `make` makes. Raises as it does, and `KernelError` or `StorageError` if no cache can be written."""
    cache = build.writable_cache()
    folder = cache / "verified"
    with storage_errors(f"cannot write to {cache}"):
        folder.mkdir(exist_ok=True)
    with build.locked(folder, spec.name):  # else of two processes that add to a stamp, one would lose what it found
        made = make(spec, report, extra)
        write_json(cache / _path(spec, made.target, made.arch), asdict(made))
    return made


def make(spec: KernelSpec, report: Report, extra: Sequence[Case] = ()) -> Stamp:
    """The stamp of a report. It replaces the existing stamp, and keeps its single problems unless it failed; a report of single
    problems (`extra`) is added to the existing stamp instead. Raises `KernelError`: the report is not of a compiled kernel."""
    if report.target not in spec.targets:
        raise KernelError(f"only compiled kernels are stamped, not the back end {report.target!r}")
    arch = build.local_arch(spec.extension(report.target))
    made = Stamp(
        name=spec.name, target=report.target, arch=arch, passed=report.passed, grid=report.grid, cases=report.cases,
        dtypes=tuple(sorted({row.dtype for row in report.rows})),
        worst={f"{row.dtype} {row.tensor}": round(row.ratio, 4) for row in report.worst()},
        faults=tuple(report.faults), extra=tuple(map(str, extra)), torch=torch.__version__, cuda=torch.version.cuda or "none",
        device=torch.cuda.get_device_name() if report.target == "cuda" else build.toolchain.host_architecture(), when=now(),
    )  # fmt: skip
    there = stamp(spec, report.target, arch)
    if there is None:
        return made
    if not extra:
        return replace(made, extra=there.extra if there.passed else ())
    return replace(
        made, extra=there.extra + made.extra, passed=made.passed and there.passed, grid=there.grid,
        cases=made.cases + there.cases, dtypes=tuple(sorted({*made.dtypes, *there.dtypes})),
        worst={k: max(s.worst.get(k, 0.0) for s in (made, there)) for k in (there.worst | made.worst)},
        faults=made.faults + there.faults,
    )  # fmt: skip


def _path(spec: KernelSpec, target: Target, arch: str) -> Path:
    digest = hashlib.sha256()
    for part in (spec.extension(target).key(arch), torch.__version__, str(torch.version.cuda)):
        digest.update(part.encode() + b"\0")
    files = [*spec.python]
    if spec.record is not None and spec.record.is_file():  # it sets limits
        files.append(spec.record)
    for path in files:
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return Path("verified") / f"{spec.name}-{target}-{arch}-{digest.hexdigest()[:20]}.json"


def ensure_verified(spec: KernelSpec, cases: Case | Sequence[Case], plan: str, target: Target = "cuda") -> None:
    """Verify these problems on the current GPU, or this CPU, unless the stamp covers them, and remember them for `used`.

    Raises:
        KernelError: the kernel is wrong, now or in its stamp; or a CUDA graph is being captured.
        KernelUnavailableError: this machine cannot run it. KernelTimeoutError, or as memory `ran_out`: the GPU is busy, or too
            full to verify it. Nothing is stamped.
        ConfigError: ELMAN_VERIFY is neither skip nor empty.
    """
    cases = [cases] if isinstance(cases, Case) else list(cases)
    value = os.environ.get("ELMAN_VERIFY", "")
    if value not in ("", "skip"):
        raise ConfigError(f"ELMAN_VERIFY must be skip or unset, not {value!r}")
    if value:
        _used.update({f"{spec.name} {case}": {"plan": plan, "skipped": True, "stamp": None} for case in cases})
        return
    known = stamp(spec, target)
    faults: Iterable[str] = ()
    new = [case for case in cases if known is None or (known.passed and str(case) not in known.extra)]
    if new:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise KernelError(f"{spec.name}: {new[0]} is not verified, and a graph is being captured; run a step first")
        # A kernel without gradients is verified in moments, several of them in a row: no warning is needed.
        level = logging.WARNING if spec.differentiable else logging.INFO
        _log.log(level, "elman: first use of the kernel of %s for %s: verifying it", spec.name, new[0])
        report = _apart(lambda: verify(spec, target, cases=new, opcheck=spec.differentiable))
        if report.unsuitable:
            raise KernelError(f"the kernel of {spec.name} cannot be verified: {report.unsuitable[0]}")
        try:
            known = save(spec, report, new)
        except (KernelError, StorageError) as error:  # a read-only cache: the result still holds in this process
            _log.warning("elman: %s; without it every process verifies again", error)
            known = make(spec, report, new)
        faults = failures(report)
    assert known is not None
    if not known.passed:
        why = next(iter(faults), f"its stamp of {known.when} says that it failed")
        raise KernelError(
            f"the kernel of {spec.name} gives wrong numbers on this machine: {why}. Type `elman verify {spec.name}` for the "
            "table; ELMAN_KERNELS=off avoids the kernel, ELMAN_VERIFY=skip uses it unverified"
        )
    _used.update({f"{spec.name} {case}": {"plan": plan, "skipped": False, "stamp": asdict(known)} for case in cases})


def used() -> dict[str, Mapping[str, Any]]:
    """The kernels used so far, for the manifest: `{"NAME T=64 B=32 d=1024 bfloat16": {plan, skipped, stamp}}`; the stamp is
    None with ELMAN_VERIFY=skip."""
    return dict(_used)


def _apart(check: Callable[[], Report]) -> Report:
    """The result of `check()` in a new thread: a first use may happen under hooks on saved tensors (gradient checkpointing),
    autocast, a default device or fake tensors, which apply only to the thread that set them."""
    here = (torch.cuda.set_device, (torch.cuda.current_device(),)) if torch.cuda.is_available() else ()
    with ThreadPoolExecutor(1, "elman-verify", *here) as pool:
        return pool.submit(check).result()
