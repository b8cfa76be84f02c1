"""Speed of training on 1, 2 and 4 GPUs of one machine, the batch growing with them: tok/s, efficiency, memory.

    python benchmarks/scaling.py [--out benchmarks/results/scaling.json] [--gpus 1,2,4] [--models e1@1280x6,…] [--rows 32]
        [--length 512] [--steps 60] [--kinds auto,eager,fsdp] [--together] [--device cuda]

Each measurement is `elman train` under `torchrun` in processes of its own, on random bytes, with nothing left out: reading,
forward, backward, sums over the ranks, clipping, AdamW, metrics. tok/s: the median over the steps after the first third, of all
ranks together. Efficiency: tok/s over that of one GPU times the number of GPUs; the one GPU runs as `elman train` does by
default, which is a captured step. Kinds: auto, the whole step with its sums over the ranks as one CUDA graph, where nothing
stands against it; eager, gradients summed while the backward runs; fsdp, weights shared out. What fails has its last line in
the table; what takes longer than --limit has there how far each rank came and what it waited in, and all that was written, with
the stacks of all threads, in a log beside --out. The file is written after every row. --together measures the models on one
GPU at the same time, each on a GPU of its own, and says so in the file. --add keeps the rows that the file has already.

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
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from machine import commit
from stacks import ENVIRONMENT, PHASE, end_with_stacks, no_core_files, where

MODELS = "e1@1280x6,e42@1536x6,e88:h32n16@1536x20"
KINDS = {
    "auto": ("train.parallel=ddp",),
    "eager": ("train.parallel=ddp", "train.launch=eager"),
    "fsdp": ("train.parallel=fsdp",),
}
LEAST = 10.0
"""Seconds below which a measurement is not begun."""
TARGET = 3.6
"""Times the speed of one GPU that four are to reach."""


def command(model: str, gpus: int, kind: str, text: Path, run: Path, asked: argparse.Namespace) -> list[str]:
    """The line that a user would type; torchrun waits in vain for a machine whose own name has no address."""
    launcher = [sys.executable, "-m"]
    if gpus > 1:
        launcher += ["torch.distributed.run", "--standalone", "--local-addr", "localhost"]
        launcher += ["--nproc-per-node", str(gpus), "-m"]
    sets = [
        f"train.batch_size={asked.rows * gpus}", f"train.chunk_size={asked.length}", f"train.device={asked.device}",
        "train.save_every=0", "train.eval_every=0", "data.heldout=0.0", "train.warmup=0", "train.schedule=constant",
        "train.lr=1e-4", *(KINDS[kind] if gpus > 1 else ()),
    ]  # fmt: skip
    words = ["elman_core", "train", model, "--data", str(text), "--out", str(run), "--steps", str(asked.steps)]
    return [*launcher, *words, *(w for s in sets for w in ("--set", s))]


def run(words: list[str], environment: dict[str, str], limit: float) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, or end it and every process that it started; each says first where it was.

    Raises:
        subprocess.TimeoutExpired: it took longer than `limit` seconds; holds all that was written.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:  # pipes might fill while nobody reads them

        def said() -> list[str]:
            return [file.seek(0) or file.read().decode(errors="replace") for file in (out, err)]

        process = subprocess.Popen(words, stdout=out, stderr=err, env=environment)
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            end_with_stacks(process)
            process.wait()
            raise subprocess.TimeoutExpired(words, limit, *said()) from None
        except BaseException:
            end_with_stacks(process)
            raise
        return subprocess.CompletedProcess(words, process.returncode, *said())


def measure(
    model: str, gpus: int, kind: str, asked: argparse.Namespace, folder: Path, device: int | None = None
) -> dict[str, Any]:
    """One row: the figures, or the reason for which there are none. `device`: the one GPU that is visible."""
    row: dict[str, Any] = {
        "model": model,
        "gpus": gpus,
        "kind": kind if gpus > 1 else "one",
        "rows_per_gpu": asked.rows,
    }
    into = folder / f"{model.replace(':', '_')}-{gpus}-{kind}"
    text = folder / "text"
    environment = {**os.environ, **ENVIRONMENT, "ELMAN_RANK_TIMEOUT": os.environ.get("ELMAN_RANK_TIMEOUT", "120")}
    if device is not None:
        environment["CUDA_VISIBLE_DEVICES"] = _visible(device)
    left = asked.until - time.monotonic()
    limit = min(asked.limit, left)
    if left < min(asked.limit, LEAST):
        return {**row, "reason": "no time was left for it"}
    began = time.monotonic()
    try:
        done = run(command(model, gpus, kind, text, into, asked), environment, limit)
    except subprocess.TimeoutExpired as late:
        said = str(late.stderr or "")
        log = write_log(asked.out, into.name, f"{late.output or ''}\n{said}")
        return {**row, "reason": f"not done after {limit:.0f} s; {where(said) or 'it said nothing'}; {log.name}"}
    if done.returncode:
        write_log(asked.out, into.name, f"{done.stdout}\n{done.stderr}")
        lines = [line for line in PHASE.sub("", done.stderr).splitlines() if line.startswith("elman:")]
        lines = lines or done.stderr.splitlines()
        return {**row, "reason": lines[-1] if lines else f"exit code {done.returncode}"}
    seconds = round(time.monotonic() - began, 1)
    steps = [json.loads(line) for line in (into / "metrics.jsonl").read_text().splitlines()]
    speeds = [s["tok_s"] for s in steps if s["kind"] == "step"][asked.steps // 3 :]
    manifest = json.loads((into / "manifest.json").read_text())
    low, middle, high = np.percentile(speeds, [10, 50, 90])
    return {
        **row,
        "tok_s": round(middle),
        "tok_s_10_90": [round(low), round(high)],
        "memory_gib": round(max(s["memory"] for s in steps if s["kind"] == "step") / 2**30, 2),
        "launch": manifest["step"]["mode"],
        "parallel": manifest["parallel"],
        "seconds": seconds,
        "phases": manifest.get("phases"),
        "parameters": manifest["parameters"],
        "hardware": manifest["hardware"],
        "versions": manifest["versions"],
        "git_commit": manifest["git_commit"],
    }


def write_log(out: Path, name: str, text: str) -> Path:
    """What the processes of a measurement that failed have written, beside the results."""
    log = out.with_name(f"{out.stem}-{name}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(text, encoding="utf-8")
    return log


def _visible(device: int) -> str:
    """One of the GPUs that this process sees."""
    seen = [d for d in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if d]
    return seen[device] if seen else str(device)


def together(models: list[str], asked: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """The rows of one GPU, measured at the same time, on as many GPUs as there are models or GPUs."""
    import torch

    count = max(1, torch.cuda.device_count())
    for first in range(0, len(models), count):
        some = models[first : first + count]
        with ThreadPoolExecutor(len(some)) as pool:
            jobs = [pool.submit(measure, m, 1, "one", asked, folder, i) for i, m in enumerate(some)]
            yield from ({**job.result(), "beside": len(some) - 1} for job in jobs)


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


def measured(asked: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Every row that was asked for: model by model, or with --together those of one GPU first."""
    models, counts, kinds = asked.models.split(","), [int(g) for g in asked.gpus.split(",")], asked.kinds.split(",")
    if asked.together and 1 in counts:
        yield from together(models, asked, folder)
        counts.remove(1)
    for model in models:
        for gpus in counts:
            for kind in kinds if gpus > 1 else ["one"]:
                yield measure(model, gpus, kind, asked, folder)


def write(rows: list[dict[str, Any]], asked: argparse.Namespace) -> None:
    """The file."""
    result = {
        "what": "training speed on several GPUs of one machine",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "commit": asked.commit,
        "length": asked.length,
        "steps": asked.steps,
        "target_on_four": TARGET,
        "rows": rows,
    }
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


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
    parser.add_argument("--limit", type=float, default=600, help="seconds for one measurement")
    parser.add_argument("--seconds", type=float, default=7200, help="for all of them: what does not fit is not begun")
    parser.add_argument("--together", action="store_true", help="on one GPU all models at the same time")
    parser.add_argument("--add", action="store_true", help="keep the rows that the file has")
    parser.add_argument("--commit", default=commit())
    asked = parser.parse_args(argv)
    asked.until = time.monotonic() + asked.seconds
    no_core_files()
    rows: list[dict[str, Any]] = json.loads(asked.out.read_text())["rows"] if asked.add and asked.out.exists() else []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = 64 * 2**20 if asked.device == "cuda" else 2**20
        np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8).tofile(folder / "text")
        for row in measured(asked, folder):
            rows = with_efficiency([*rows, row])
            write(rows, asked)
            print(table(rows[-1:]).splitlines()[-1], flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
