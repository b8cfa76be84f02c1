"""Verify each size at its first use on a machine, in training and in decoding, and stamp it.

`ELMAN_VERIFY=skip` turns this off. `used()`, which goes into a run's manifest, then says so.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import torch

from elman_core.registry.errors import ConfigError, KernelError, StorageError

from . import stamps
from .spec import Case, KernelSpec
from .verify import Report, failures, verify

_log = logging.getLogger("elman")
_used: dict[str, Mapping[str, Any]] = {}


def ensure_verified(spec: KernelSpec, cases: Case | Sequence[Case], plan: str) -> None:
    """Verify these problems on the current GPU unless the stamp covers them, and remember them for `used`.

    Raises:
        KernelError: the kernel is wrong, now or in its stamp; or a CUDA graph is being captured.
        torch.OutOfMemoryError: there is too little memory to verify it; nothing is stamped.
        ConfigError: ELMAN_VERIFY is neither skip nor empty.
    """
    cases = [cases] if isinstance(cases, Case) else list(cases)
    if _skipped():
        _used.update({f"{spec.name} {case}": {"plan": plan, "skipped": True, "stamp": None} for case in cases})
        return
    known = stamps.stamp(spec, "cuda")
    new = [case for case in cases if known is None or (known.passed and str(case) not in known.extra)]
    if new:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise KernelError(
                f"{spec.name}: {new[0]} was never verified, and a graph is being captured; run one step first"
            )
        # A kernel without gradients is verified in moments, several of them in a row: no warning is needed.
        level = logging.WARNING if spec.differentiable else logging.INFO
        _log.log(level, "elman: first use of the kernel of %s for %s: verifying it", spec.name, new[0])
        report = _apart(lambda: verify(spec, "cuda", cases=new, opcheck=spec.differentiable))
        known = stamps.make(spec, report, extra=new)
        try:
            stamps.save(spec, known)
        except (KernelError, StorageError) as error:  # a read-only cache: the result still holds in this process
            _log.warning("elman: %s; without it every process verifies again", error)
        if not report.passed:
            _refuse(spec, next(iter(failures(report)), ""))
    assert known is not None
    if not known.passed:
        _refuse(spec, f"its stamp of {known.when} says that it failed")
    _used.update({f"{spec.name} {case}": {"plan": plan, "skipped": False, "stamp": asdict(known)} for case in cases})


def used() -> dict[str, Mapping[str, Any]]:
    """The kernels used so far, for the manifest: `{"NAME T=64 B=32 d=1024 bfloat16": {plan, skipped, stamp}}`; the stamp is
    None with ELMAN_VERIFY=skip."""
    return dict(_used)


def _apart(check: Callable[[], Report]) -> Report:
    """The result of `check()` in a new thread: a first use may happen under hooks on saved tensors (gradient checkpointing),
    autocast, a default device or fake tensors, which apply only to the thread that set them."""
    index = torch.cuda.current_device() if torch.cuda.is_available() else None

    def run() -> Report:
        if index is not None:
            torch.cuda.set_device(index)
        return check()

    with ThreadPoolExecutor(1, "elman-verify") as pool:
        return pool.submit(run).result()


def _skipped() -> bool:
    value = os.environ.get("ELMAN_VERIFY", "")
    if value not in ("", "skip"):
        raise ConfigError(f"ELMAN_VERIFY must be skip or unset, not {value!r}")
    return value == "skip"


def _refuse(spec: KernelSpec, why: str) -> None:
    raise KernelError(
        f"the kernel of {spec.name} gives wrong numbers on this machine: {why}. Type `elman verify {spec.name}` for the "
        "table; ELMAN_KERNELS=off runs without it, ELMAN_VERIFY=skip in spite of it"
    )
