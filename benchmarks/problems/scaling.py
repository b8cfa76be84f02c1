"""Training on 1, 2, 4, … GPUs of one machine, with a proportional batch: tok/s of all ranks together, efficiency, memory.

Each row is a complete `elman train` under torchrun, on random bytes: reading, forward, backward, sums over the ranks,
clipping, AdamW, metrics. tok/s: the median over the steps after the first third. `auto`: the whole step with its sums over the
ranks as one CUDA graph; `eager`: gradients summed while the backward runs; `fsdp`: sharded weights. A run that does not end
within ten minutes is killed, and its row has the last output, including how far each rank came. On CPUs (gloo) it only shows
that everything runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from harness import Row, Setting

MODELS = ("e1@1280x6", "e42@1536x6", "e88:h32n16@1536x20")
KINDS = {
    "auto": ("train.parallel=ddp",),
    "eager": ("train.parallel=ddp", "train.launch=eager"),
    "fsdp": ("train.parallel=fsdp",),
}
LIMIT = 600


def command(model: str, ranks: int, kind: str, text: Path, run: Path, setting: Setting) -> list[str]:
    """The command that a user would type; torchrun waits in vain for a machine whose own name has no address."""
    rows, length, steps = (2, 16, 6) if setting.tiny else (32, 512, 60)
    launcher = [sys.executable, "-m"]
    if ranks > 1:
        launcher += [
            "torch.distributed.run",
            "--standalone",
            "--local-addr",
            "localhost",
            "--nproc-per-node",
            str(ranks),
            "-m",
        ]
    sets = [
        f"train.batch_size={rows * ranks}", f"train.chunk_size={length}", f"train.device={setting.device.type}",
        "train.save_every=0", "train.eval_every=0", "data.heldout=0.0", "train.warmup=0",
        "train.schedule=constant", "train.lr=1e-4",
        *(KINDS[kind] if ranks > 1 else ()),
    ]  # fmt: skip
    words = ["elman_core", "train", model, "--data", str(text), "--out", str(run), "--steps", str(steps)]
    return [*launcher, *words, *(word for one in sets for word in ("--set", one))]


def measure(model: str, ranks: int, kind: str, setting: Setting) -> Row:
    run, text, log = (
        setting.folder / f"{ranks}-{kind}-{model.replace(':', '_')}{end}" for end in ("", ".text", ".log")
    )
    np.random.default_rng(0).integers(0, 256, 2**20 if setting.tiny else 2**26, dtype=np.uint8).tofile(text)
    with log.open("wb") as said:
        process = subprocess.Popen(
            command(model, ranks, kind, text, run, setting), stdout=said, stderr=subprocess.STDOUT, start_new_session=True,
            env=os.environ | {"ELMAN_PHASES": "1"},
        )  # fmt: skip
        try:
            code = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if code != 0:
        last = " | ".join(log.read_text(errors="replace").strip().splitlines()[-2 * ranks :])
        raise RuntimeError(f"{'not done in time' if code is None else f'exit code {code}'}: {last}")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    manifest = json.loads((run / "manifest.json").read_text())
    speed = float(np.median([step["tok_s"] for step in steps[len(steps) // 3 :]]))
    return {
        "tok_s": round(speed), "peak_gib": round(max(step["memory"] or 0 for step in steps) / 2**30, 2),
        "ran": manifest["step"]["mode"],
        "parallel": manifest["parallel"],
    }  # fmt: skip


def rows(setting: Setting) -> Iterator[Row]:
    here = 2 if setting.device.type == "cpu" else torch.cuda.device_count()
    for model in ("lstm@16x1",) if setting.tiny else MODELS:
        one = 0
        for ranks in (n for n in ((2,) if setting.tiny else (1, 2, 4, 8)) if n <= here):
            for kind in KINDS if ranks > 1 and not setting.tiny else ("auto",):
                if setting.wants(model=model, ranks=ranks, kind=kind):
                    row = setting.row(
                        lambda m=model, r=ranks, k=kind: measure(m, r, k, setting),
                        model=model,
                        gpus=ranks,
                        who=kind,
                        kind="ours",
                    )  # type: ignore[misc]
                    one = row.get("tok_s", 0) if ranks == 1 else one
                    times = {"times_one": round(row["tok_s"] / one, 3)} if one and "tok_s" in row else {}
                    yield row | times
