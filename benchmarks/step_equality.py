"""Do a captured and a compiled training step compute what the eager one does? Whole models, as `elman train` runs them.

    python benchmarks/step_equality.py [--out FILE] [--models e1@512x2,e42@512x2,e88:h8n32@512x2] [--device cuda]

For each model and way of launching a step (`train.launch`), the losses of a few steps from the same seed beside the eager ones.
A CUDA graph runs the same kernels: its losses are the same in every bit. A compiler adds up in another order: in float32 the
losses agree to 1e-4 of their size (rounding, 6e-8, as a few optimizer steps enlarge it); in bfloat16 the gap is only reported.
Leaves with 1 if a model fails that; what cannot run here says why.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

MODELS = "e1@512x2,e42@512x2,e88:h8n32@512x2"
LAUNCHES = ("graph", "compile", "compile+graph")
FLOAT32_LIMIT = 1e-4


def losses(model: str, launch: str, precision: str, device: str, text: Path, steps: int) -> list[float]:
    """Loss of each step, nats per byte."""
    from elman_core.registry import parse_size
    from elman_core.training.settings import from_dict
    from elman_core.training.start import start

    variant, width, depth = parse_size(model)
    settings = from_dict({
        "model": {"variant": variant, "hidden_size": width, "num_hidden_layers": depth},
        "data": {"path": str(text)},
        "train": {
            "batch_size": 8, "chunk_size": 128, "steps": 1_000_000, "device": device, "precision": precision,
            "launch": launch, "schedule": "constant", "warmup": 0, "lr": 1e-3,
        },
    })  # fmt: skip
    torch.compiler.reset()
    with tempfile.TemporaryDirectory() as folder:
        made = start(settings, Path(folder) / "run", quiet=True)
        try:
            return [made.train_step()["loss"] for _ in range(steps)]
        finally:
            made.folder.close()


def compare(eager: list[float], other: list[float], launch: str, precision: str) -> dict[str, Any]:
    """The largest gap between two runs' losses, relative, and whether it is one that this way of launching may have."""
    gap = max(abs(a - b) / abs(a) for a, b in zip(eager, other, strict=True))
    limit = 0.0 if launch == "graph" else FLOAT32_LIMIT if precision == "fp32" else None
    return {"gap": gap, "limit": limit, "passed": limit is None or gap <= limit}


def rows_of(model: str, device: str, steps: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text"
        text.write_bytes(random.Random(0).randbytes(1 << 18))
        for precision in ("fp32", "bf16"):
            eager: list[float] | None = None
            for launch in ("eager", *LAUNCHES):
                row: dict[str, Any] = {"model": model, "precision": precision, "launch": launch}
                try:
                    made = losses(model, launch, precision, device, text, steps)
                except Exception as error:  # a row of the table: whatever goes wrong is its result
                    first = (str(error).splitlines() or [""])[0]
                    row |= {
                        "passed": device == "cpu" and "graph" in launch,
                        "reason": f"{type(error).__name__}: {first}",
                    }
                else:
                    if eager is None:
                        eager = made
                    row |= compare(eager, made, launch, precision) if launch != "eager" else {"passed": True}
                    row["losses"] = made
                found.append(row)
                print(line(row), flush=True)
    return found


def line(row: dict[str, Any]) -> str:
    head = f"{row['model']:22} {row['precision']:5} {row['launch']:14}"
    if "reason" in row:
        return f"{head} {row['reason']}"
    what = f"gap {row['gap']:.1e}, limit {row['limit']}" if "gap" in row else f"losses {row['losses'][0]:.4f} ..."
    return f"{head} {what}{'' if row['passed'] else '  WRONG'}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args(arguments)
    rows = [row for model in given.models.split(",") for row in rows_of(model, given.device, given.steps)]
    if given.out:
        given.out.write_text(json.dumps({"what": "losses of whole training steps", "rows": rows}, indent=1) + "\n")
    return 0 if all(row["passed"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
