"""Recorded errors: the measured distance of each kernel from float64, which limits later verifications.

A plugin ships one JSON file with the worst errors that `elman verify --record` measured on the full grid:
`{"sm_90": {"device", "torch", "cuda", "errors": {KERNEL: {"bfloat16 d w": 1.9e-3}}}}`. On that architecture `verify` allows
twice those errors.
"""

from __future__ import annotations

import json
from decimal import ROUND_UP, Context

import torch

from elman_core.registry.errors import KernelError
from elman_core.storage import write_text

from . import build
from .spec import KernelSpec
from .verify import Report, read_record

_THREE_DIGITS = Context(prec=3, rounding=ROUND_UP)


def write(spec: KernelSpec, report: Report) -> dict[str, tuple[float, float]]:
    """Record the report's worst error of each dtype and tensor for this machine's architecture.

    Returns:
        the errors that grew: `{"bfloat16 d w": (before, now)}`.

    Raises:
        KernelError: the report is not of a compiled kernel's full grid, or it failed.
        StorageError: the file cannot be written.
    """
    target = report.target
    if target not in spec.targets or report.grid != "full" or not report.passed or spec.record is None:
        raise KernelError(f"{spec.name}: only a full grid that a compiled kernel passed is recorded")
    errors: dict[str, float] = {}
    for row in report.rows:
        key = f"{row.dtype} {row.tensor}"
        errors[key] = max(errors.get(key, 0.0), float(_THREE_DIGITS.create_decimal(row.error)))
    arch = build.local_arch(spec.extension(target))
    known = read_record(spec)
    before = known.get(arch, {}).get("errors", {})
    was = before.get(spec.name, {})
    known[arch] = {
        "device": torch.cuda.get_device_name() if target == "cuda" else arch,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "errors": {**before, spec.name: dict(sorted({**was, **errors}.items()))},
    }
    write_text(spec.record, json.dumps(known, indent=1) + "\n")
    return {key: (was[key], now) for key, now in errors.items() if key in was and now > was[key]}
