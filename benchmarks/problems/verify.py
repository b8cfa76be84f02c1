"""Every kernel against float64 on the full grid (`elman verify`): of all outputs, gradients and cases, the one closest to its
limit, and the first failure, if any. On a CPU, the CPU's kernels.

Relative L2 errors; `reference` is the error of plain PyTorch in the same dtype. Nothing is timed, so several kernels run at
once, as many as fit into a GPU's memory, on the GPUs in turn; one that runs out of memory runs again at the end, alone. --only
names variants or kernels; a kernel without a dtype has no row for it. `left_out` counts cases that the GPU is too small for.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import torch
from elman_authors import grids
from elman_authors.cli.build import chosen_dtypes, chosen_kernels
from elman_authors.cli.verify import has_case
from harness import Row, Setting, visible_gpus

from elman_core.registry import list_variants

AT_ONCE, NEEDS = 10, 12 << 30
"""The most processes on one GPU, and the bytes of its memory for each."""
OUT_OF_MEMORY = 3
"""The exit code of a command that ran out of memory."""
DTYPES = {"cuda": ("bf16", "fp16", "fp32"), "cpu": ("bf16", "fp32")}
SHARED = {"cuda": ("decode", "causal_conv"), "cpu": ("causal_conv",)}
"""Kernels of every model."""


def names(target: str) -> Iterator[str]:
    """The installed variants with a kernel for a GPU, or for a CPU, and the kernels common to all; long ones first."""
    yield from SHARED[target]
    variants = [entry.variant for entry in list_variants().values()]
    variants.sort(
        key=lambda v: (
            -len([case for kernel in v.kernels for case in grids.cases(kernel, target) if target in kernel.targets])
        )
    )
    yield from (v.name for v in variants if any(target in kernel.targets for kernel in v.kernels))


def reports(log: str) -> list[dict[str, Any]]:
    """The output of `elman verify --json`; warnings may precede it.

    Raises:
        ValueError: there is none.
    """
    start = re.search(r"^\[", log, re.MULTILINE)
    if start is None:
        raise ValueError(f"no report: {log.strip().splitlines()[-1:]}")
    found: list[dict[str, Any]] = json.JSONDecoder().raw_decode(log[start.start() :])[0]
    return found


def found_of(report: dict[str, Any]) -> Row:
    """The row with the largest error / limit, if any case gave one; `reason` if it is not why the kernel failed."""
    row = max(report["rows"], key=lambda row: float(row["ratio"]), default={})
    found: Row = {name: row[name] for name in ("tensor", "case", "error", "reference", "limit", "ratio") if row}
    if report["left_out"]:
        found["left_out"] = len(report["left_out"])
    if said := [*report["faults"], *report["unsuitable"]]:
        found["reason"] = said[0] if len(said) == 1 else f"{said[0]} (and {len(said) - 1} more)"
    return found


def verified(name: str, dtype: str, grid: str, backend: str, gpu: str) -> list[Row] | None:
    """The rows of a process; None if it ran out of memory."""
    words = ["verify", name, "--grid", grid, "--dtype", dtype, "--backend", backend, "--json"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu, "OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "elman_core", *words], capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode == OUT_OF_MEMORY:
        return None
    try:
        found = reports(done.stdout)
    except ValueError:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return [{"variant": name, "dtype": dtype, "kind": "ours", "reason": said}]
    seconds = round(time.monotonic() - began)
    common = {"variant": name, "dtype": dtype, "kind": "ours", "seconds": seconds}
    return [
        {**common, "kernel": r["name"], "cases": r["cases"], **found_of(r), "agrees": bool(r["passed"])} for r in found
    ]


def rows(setting: Setting) -> Iterator[Row]:
    target = setting.device.type
    cuda = target == "cuda"
    chosen = ("e42",) if setting.tiny else setting.only or tuple(names(target))
    grid, dtypes = ("quick", ("fp64",)) if setting.tiny else ("full", DTYPES[target])
    backend = "host" if setting.tiny and not cuda else target
    gpus = visible_gpus(torch.cuda.device_count() if cuda else 1)
    each = min(AT_ONCE, max(1, torch.cuda.mem_get_info()[0] // NEEDS)) if cuda else 1
    jobs = [(name, dtype) for name in chosen for dtype in dtypes if takes(name, dtype, backend, grid)]
    placed = [(*job, grid, backend, gpus[number % len(gpus)]) for number, job in enumerate(jobs)]
    with ThreadPoolExecutor(each * len(gpus)) as pool:
        started = {pool.submit(verified, *job): job for job in placed}
        again = []
        for done in as_completed(started):
            if (found := done.result()) is None:
                again.append(started[done])
            yield from found or ()
    for name, dtype, *where in again:
        said = f"out of memory, alone on GPU {where[-1]}"
        yield from verified(name, dtype, *where) or [{"variant": name, "dtype": dtype, "kind": "ours", "reason": said}]


def takes(name: str, dtype: str, backend: str, grid: str) -> bool:
    """Whether a kernel of this variant or name has a case of this dtype."""
    return any(has_case(spec, backend, grid, chosen_dtypes(dtype)) for spec in chosen_kernels([name], backend))
