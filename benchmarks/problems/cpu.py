"""Whole training steps on a CPU: tok/s and the peak of resident memory of models of about 2M parameters.

Each figure comes from its own process, which trains as `elman train` does. Before and after take turns, so that other work on
the machine slows both. "after" is this checkout. "before" is another checkout's Python, named by ELMAN_BEFORE; without it,
plain PyTorch (ELMAN_KERNELS=off; for lstm and gru that is torch's own). If a step of "before" takes minutes, only its first
step is run. Otherwise the first step, which may compile and verify, is counted separately ("first_s"). tok_cpu_s: tokens per
second of processor time, which other processes disturb less. load: runnable processes, averaged over the last minute.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from harness import HERE, Row, Setting

from .step import trainer

MATRICES = (
    "e88:conv_linear@128x3", "e97@192x3", "e14@304x3", "m2rnn@384x4", "e75@640x3", "e74@640x3", "e73@640x3", "e71@640x3",
)  # fmt: skip
VECTORS = ("e1@384x3", "e42@448x4", "e63@384x3", "e61@448x3", "e68@448x3", "gru@288x3", "lstm@256x3")
MODELS = (*MATRICES, *VECTORS)
BATCH, LENGTH, STEPS = 4, 512, {"before": 0, "after": 8}


def rows(setting: Setting) -> Iterator[Row]:
    if setting.tiny:
        yield setting.row(lambda: measure(MODELS[0], setting.folder, 16, 1), model=MODELS[0], who="after")
        return
    for model in MODELS:
        if not setting.wants(model=model, variant=model.partition("@")[0].partition(":")[0]):
            continue
        made: dict[str, list[Row]] = {who: [] for who in STEPS}
        steps = STEPS if model in MATRICES else dict.fromkeys(STEPS, 8)
        for _ in range(setting.repeats):
            for who, found in made.items():
                found.append(
                    setting.row(lambda who=who, model=model, steps=steps: apart(setting, who, model, steps[who]))
                )  # type: ignore[misc]
        for who, found in made.items():
            there = [row for row in found if "tok_s" in row]
            figures = {name: [row[name] for row in there] for name in ("tok_s", "tok_cpu_s", "first_s", "peak_gib")}
            row = {name: statistics.median(each) for name, each in figures.items() if each}
            each = {"tok_s_each": figures["tok_s"]} if there else {}
            yield {"model": model, "who": who, "batch": BATCH, "length": LENGTH, **found[-1], **row, **each}


def apart(setting: Setting, who: str, model: str, steps: int) -> Row:
    before = os.environ.get("ELMAN_BEFORE") if who == "before" else None
    plain = {"ELMAN_KERNELS": "off"} if who == "before" and not before else {}
    words = [before or sys.executable, "-m", "problems.cpu", model, str(setting.folder), str(LENGTH), str(steps)]
    done = subprocess.run(words, env={**os.environ, **plain}, cwd=HERE, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    found: Row = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(model: str, folder: Path, length: int, steps: int) -> Row:
    setting = Setting(torch.device("cpu"), False, False, 1, (), folder)
    taken: list[tuple[float, float]] = []
    with trainer(model, "eager", BATCH, length, setting) as made:
        for _ in range(1 + steps):
            start = time.perf_counter(), time.process_time()
            made.advance(1)
            taken.append((time.perf_counter() - start[0], time.process_time() - start[1]))
        wall, cores = (statistics.median(each) for each in zip(*(taken[1:] or taken), strict=True))
        return {
            "parameters": sum(p.numel() for p in made.model.parameters()),
            "tok_s": round(BATCH * length / wall),
            "tok_cpu_s": round(BATCH * length / cores),
            "first_s": round(taken[0][0], 2),
            "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
            "load": round(os.getloadavg()[0], 1),
        }


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))))
