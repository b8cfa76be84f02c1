"""Speed of training on 1, 2 and 4 GPUs of one machine, the batch growing with them: tok/s, efficiency, memory.

    python benchmarks/scaling.py [--out benchmarks/results/scaling.json] [--gpus 1,2,4] [--models e1@1280x6,…] [--rows 32]
        [--length 512] [--steps 60] [--kinds auto,eager,fsdp] [--device cuda]

Each measurement is `elman train` under `torchrun` in processes of its own, on random bytes, with nothing left out: reading,
forward, backward, sums over the ranks, clipping, AdamW, metrics. tok/s: the median over the steps after the first third, of all
ranks together. Efficiency: tok/s over that of one GPU times the number of GPUs; the one GPU runs as `elman train` does by
default, which is a captured step. Kinds: auto, the whole step with its sums over the ranks as one CUDA graph, where nothing
stands against it; eager, gradients summed while the backward runs; fsdp, weights shared out. What fails has its last line in
the table. The file is written after every row.

On CPUs (--device cpu, gloo) it shows that it runs, and no speed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

MODELS = "e1@1280x6,e42@1536x6,e88:h32n16@1536x20"
KINDS = {
    "auto": ("train.parallel=ddp",),
    "eager": ("train.parallel=ddp", "train.launch=eager"),
    "fsdp": ("train.parallel=fsdp",),
}
TARGET = 3.6
"""Times the speed of one GPU that four are to reach."""


def command(model: str, gpus: int, kind: str, text: Path, run: Path, asked: argparse.Namespace) -> list[str]:
    """The line that a user would type."""
    python = [sys.executable, "-m"]
    launcher = (
        [*python, "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus), "-m"] if gpus > 1 else python
    )
    sets = [
        f"train.batch_size={asked.rows * gpus}", f"train.chunk_size={asked.length}", f"train.device={asked.device}",
        "train.save_every=0", "train.eval_every=0", "data.heldout=0.0", "train.warmup=0", "train.schedule=constant",
        "train.lr=1e-4", *(KINDS[kind] if gpus > 1 else ()),
    ]  # fmt: skip
    words = ["elman_core", "train", model, "--data", str(text), "--out", str(run), "--steps", str(asked.steps)]
    return [*launcher, *words, *(w for s in sets for w in ("--set", s))]


def measure(model: str, gpus: int, kind: str, asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One row: the figures, or the reason for which there are none."""
    row: dict[str, Any] = {
        "model": model,
        "gpus": gpus,
        "kind": kind if gpus > 1 else "one",
        "rows_per_gpu": asked.rows,
    }
    run = folder / f"{model.replace(':', '_')}-{gpus}-{kind}"
    text = folder / "text"
    environment = {**os.environ, "ELMAN_RANK_TIMEOUT": os.environ.get("ELMAN_RANK_TIMEOUT", "120")}
    try:
        done = subprocess.run(
            command(model, gpus, kind, text, run, asked),
            capture_output=True,
            text=True,
            env=environment,
            timeout=asked.limit,
        )
    except subprocess.TimeoutExpired:
        return {**row, "reason": f"not done after {asked.limit} s"}
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("elman:")] or done.stderr.splitlines()
        return {**row, "reason": said[-1] if said else f"exit code {done.returncode}"}
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    speeds = [s["tok_s"] for s in steps if s["kind"] == "step"][asked.steps // 3 :]
    manifest = json.loads((run / "manifest.json").read_text())
    low, middle, high = np.percentile(speeds, [10, 50, 90])
    return {
        **row,
        "tok_s": round(middle),
        "tok_s_10_90": [round(low), round(high)],
        "memory_gib": round(max(s["memory"] for s in steps if s["kind"] == "step") / 2**30, 2),
        "launch": manifest["step"]["mode"],
        "parallel": manifest["parallel"],
        "parameters": manifest["parameters"],
        "hardware": manifest["hardware"],
        "versions": manifest["versions"],
        "git_commit": manifest["git_commit"],
    }


def with_efficiency(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, each with its speed relative to one GPU."""
    one = {r["model"]: r["tok_s"] for r in rows if r["gpus"] == 1 and "tok_s" in r}
    made = []
    for row in rows:
        if "tok_s" in row and row["model"] in one:
            times = row["tok_s"] / one[row["model"]]
            row = {**row, "times_one": round(times, 3), "efficiency": round(times / row["gpus"], 3)}
        made.append(row)
    return made


def table(rows: list[dict[str, Any]]) -> str:
    """For people."""
    lines = [f"{'model':24}{'GPUs':>5} {'kind':6}{'tok/s':>12}{'x one':>8}{'efficiency':>12}{'GiB':>8}"]
    for r in rows:
        start = f"{r['model']:24}{r['gpus']:>5} {r['kind']:6}"
        if "reason" in r:
            lines.append(f"{start}  {r['reason']}")
        else:
            lines.append(
                f"{start}{r['tok_s']:>12,}{r.get('times_one', float('nan')):>8.2f}{r.get('efficiency', float('nan')):>12.1%}"
                f"{r['memory_gib']:>8.2f}"
            )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/scaling.json"))
    parser.add_argument("--gpus", default="1,2,4", help="numbers of GPUs; 1 is what the others are compared with")
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--kinds", default="auto,eager")
    parser.add_argument("--rows", type=int, default=32, help="rows of the batch on each GPU")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--limit", type=int, default=600, help="seconds for one measurement")
    asked = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.random.default_rng(0).integers(
            0, 256, 64 * 2**20 if asked.device == "cuda" else 2**20, dtype=np.uint8
        ).tofile(folder / "text")
        for model in asked.models.split(","):
            for gpus in map(int, asked.gpus.split(",")):
                for kind in asked.kinds.split(",") if gpus > 1 else ["one"]:
                    rows = with_efficiency([*rows, measure(model, gpus, kind, asked, folder)])
                    result = {
                        "what": "training speed on several GPUs of one machine",
                        "date": datetime.now(UTC).isoformat(timespec="seconds"),
                        "host": platform.node(),
                        "length": asked.length,
                        "steps": asked.steps,
                        "target_on_four": TARGET,
                        "rows": rows,
                    }
                    asked.out.parent.mkdir(parents=True, exist_ok=True)
                    asked.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
                    print(table(rows[-1:]).splitlines()[-1], flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
