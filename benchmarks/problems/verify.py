"""Every kernel against float64 on the full grid, `elman verify`: for each output and gradient the case that is closest to its
limit.

Relative L2 errors; `reference` is the error of plain PyTorch in the same dtype. --only names
variants or kernels instead of four that stand for the rest.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from harness import Row, Setting

NAMES = ("e88", "e1", "e42", "decode")
DTYPES = ("bf16", "fp16", "fp32")


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


def closest(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Of each tensor the row with the largest error / limit."""
    worst: dict[str, dict[str, Any]] = {}
    for row in report["rows"]:
        if row["tensor"] not in worst or row["ratio"] > worst[row["tensor"]]["ratio"]:
            worst[row["tensor"]] = row
    return worst


def rows(setting: Setting) -> Iterator[Row]:
    backend = "cuda" if setting.device.type == "cuda" else "host"
    for name in ("e42",) if setting.tiny else setting.only or NAMES:
        for dtype in ("fp64",) if setting.tiny else DTYPES:
            grid = "quick" if setting.tiny else "full"
            command = [
                sys.executable,
                "-m",
                "elman_core",
                "verify",
                name,
                "--grid",
                grid,
                "--dtype",
                dtype,
                "--backend",
                backend,
                "--json",
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            try:
                found = reports(done.stdout)
            except ValueError:
                yield {
                    "variant": name,
                    "dtype": dtype,
                    "kind": "ours",
                    "reason": (done.stderr.strip().splitlines() or [""])[-1],
                }
                continue
            for report in found:
                shape = {
                    "variant": name,
                    "kernel": report["name"],
                    "dtype": dtype,
                    "cases": report["cases"],
                    "kind": "ours",
                }
                for tensor, row in closest(report).items():
                    kept = {k: row[k] for k in ("error", "reference", "limit", "ratio", "case")}
                    yield {**shape, "tensor": tensor, **kept, "agrees": bool(report["passed"])}
