"""Train every baseline for some steps on real text, all at once, and say how its loss fell.

    python benchmarks/baselines_learn.py [--data FILE] [--steps 200] [--out benchmarks/results/baselines_learn_h200.json]

Each is an `elman train` of about 50M parameters with the settings that it has by default, B = 16, T = 512, seed 0, in a
process of its own, on one GPU that they share: nothing here measures speed. --data: without it the Python sources installed
here; of either the first 30 MB, of which 1 MiB is held out. The result has for each the mean loss in nats per byte of the
first ten steps and of every fifty steps after that, and bits per byte on held-out text; a loss has fallen if each of these
means is below the one before it. Leaves with 1 unless all have.

Triton's autotuner takes the first candidate of each kernel that fits (triton_candidates.py): which is the fastest matters not.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from machine import commit, facts
from training_step import SIZES
from triton_candidates import first_that_fits

HERE = Path(__file__).parent
MODELS = tuple(SIZES["50M"][name] for name in ("gru", "lstm", "transformer", "mamba2", "gdn"))
FIRST, EACH = 10, 50
BYTES = 30_000_000


def train(words: Sequence[str]) -> int:
    """`elman train`, with the first candidate of every autotuned kernel."""
    from elman_core.cli import main as elman

    with first_that_fits() if find_spec("triton") else nullcontext():
        return elman(["train", *words])


def start(model: str, folder: Path, data: Path, steps: int, settings: Sequence[str]) -> subprocess.Popen[str]:
    words = [model, "--data", str(data), "--steps", str(steps), "--out", str(folder)]
    for setting in ("train.seed=0", "train.save_every=0", *settings):
        words += ["--set", setting]
    return subprocess.Popen(
        [sys.executable, __file__, "--child", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def fallen(losses: Sequence[float]) -> dict[str, Any]:
    """Means of the first ten steps and of every fifty after that, and whether each is below the one before."""
    parts = [losses[:FIRST], *(losses[i : i + EACH] for i in range(FIRST, len(losses), EACH))]
    means = [round(statistics.fmean(part), 4) for part in parts if part]
    return {"means": means, "fell": len(means) > 1 and all(b < a for a, b in itertools.pairwise(means))}


def read(folder: Path) -> dict[str, Any]:
    """What a finished run says of itself."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "step"]
    heldout = [line["bits_per_byte"] for line in lines if line["kind"] == "evaluation"]
    return {"steps": len(losses), **fallen(losses), "heldout_bits_per_byte": round(heldout[-1], 4)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as of `elman train`")
    parser.add_argument("--commit", default=commit())
    parser.add_argument("--out", type=Path, default=HERE / "results" / "baselines_learn_h200.json")
    given = parser.parse_args(arguments)
    settings = given.set or ["train.batch_size=16", "train.chunk_size=512"]
    with tempfile.TemporaryDirectory() as scratch:
        whole, data = given.data, Path(scratch) / "text"
        if whole is None:
            whole = Path(scratch) / "python-sources.txt"
            subprocess.run([sys.executable, str(HERE / "python_sources.py"), str(whole)], check=True)
        with whole.open("rb") as file:
            data.write_bytes(file.read(BYTES))
        models = given.models.split(",")
        running = {m: start(m, Path(scratch) / m, data, given.steps, settings) for m in models}
        rows = []
        for model, process in running.items():
            said, _ = process.communicate()
            row: dict[str, Any] = {"model": model, "exit_code": process.returncode}
            row |= read(Path(scratch) / model) if process.returncode == 0 else {"fell": False, "said": said[-600:]}
            rows.append(row)
            print(json.dumps(row), flush=True)
        result = {"what": __doc__.splitlines()[0], "settings": settings, "bytes": data.stat().st_size}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps({**result, **facts(given.commit), "rows": rows}, indent=1) + "\n")
    return 0 if all(row["fell"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(train(sys.argv[2:]) if sys.argv[1:2] == ["--child"] else main())
