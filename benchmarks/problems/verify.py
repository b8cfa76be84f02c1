"""Every kernel against float64 on the full grid, `elman verify`: of all outputs, gradients and cases the one closest to its
limit.

Relative L2 errors; `reference` is the error of plain PyTorch in the same dtype. Nothing is timed, so several run at once, the
GPUs in turn. --only names variants or kernels; a kernel that lacks a dtype has no row of it.
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
from harness import Row, Setting, visible_gpus

from elman_core.registry import list_variants

AT_ONCE = 10
"""Processes on one GPU."""
DTYPES = ("bf16", "fp16", "fp32")
SHARED = ("decode", "causal_conv")
"""Kernels of every model."""


def names() -> Iterator[str]:
    """The installed variants with a kernel for a GPU, and the kernels of all; those that take long first."""
    yield from SHARED
    variants = [entry.variant for entry in list_variants().values()]
    variants.sort(key=lambda v: -len([case for kernel in v.kernels for case in kernel.cases("cuda", "quick")]))
    yield from (v.name for v in variants if any("cuda" in kernel.targets for kernel in v.kernels))


def reports(log: str) -> list[dict[str, Any]]:
    """What `elman verify --json` printed; warnings may stand before it.

    Raises:
        ValueError: there is none.
    """
    start = re.search(r"^\[", log, re.MULTILINE)
    if start is None:
        raise ValueError(f"no report: {log.strip().splitlines()[-1:]}")
    found: list[dict[str, Any]] = json.JSONDecoder().raw_decode(log[start.start() :])[0]
    return found


def closest(report: dict[str, Any]) -> Row:
    """The row with the largest error / limit."""
    row = max(report["rows"], key=lambda row: float(row["ratio"]))
    return {name: row[name] for name in ("tensor", "case", "error", "reference", "limit", "ratio")}


def verified(name: str, dtype: str, grid: str, backend: str, gpu: str) -> list[Row]:
    words = ["verify", name, "--grid", grid, "--dtype", dtype, "--backend", backend, "--json"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu, "OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "elman_core", *words], capture_output=True, text=True, check=False, env=environment
    )
    try:
        found = reports(done.stdout)
    except ValueError:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return [{"variant": name, "dtype": dtype, "kind": "ours", "reason": said}]
    seconds = round(time.monotonic() - began)
    common = {"variant": name, "dtype": dtype, "kind": "ours", "seconds": seconds}
    return [
        {**common, "kernel": r["name"], "cases": r["cases"], **closest(r), "agrees": bool(r["passed"])} for r in found
    ]


def rows(setting: Setting) -> Iterator[Row]:
    cuda = setting.device.type == "cuda"
    chosen = ("e42",) if setting.tiny else setting.only or tuple(names())
    grid, dtypes = ("quick", ("fp64",)) if setting.tiny else ("full", DTYPES)
    gpus = visible_gpus(torch.cuda.device_count() if cuda else 1)
    with ThreadPoolExecutor(AT_ONCE * len(gpus) if cuda else 1) as pool:
        jobs = [(name, dtype) for name in chosen for dtype in dtypes]
        started = [
            pool.submit(verified, *job, grid, "cuda" if cuda else "host", gpus[number % len(gpus)])
            for number, job in enumerate(jobs)
        ]
        for done in as_completed(started):
            yield from done.result()
