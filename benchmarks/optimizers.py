"""What an optimizer's update costs: alone in a CUDA graph, and in whole training steps.

    python benchmarks/optimizers.py [--out benchmarks/results/optimizers_h200.json] [--models e42@1664x6,…] [--batch 64]

alone    milliseconds of one update of all parameters (float32), the median of replays: torch's fused AdamW; schedule-free AdamW
         as training has it (`training.optim.schedule_free`); the package's own, whose counts are then frozen in the graph,
         so that it shows what its passes over memory cost without the host. tb_s: the bytes that must move, over the time
step     tok/s of a captured step of the model with each of the first two (T = 512), as training_step.py measures them
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gradient_sums import shapes_of
from machine import commit, facts
from schedulefree import AdamWScheduleFree
from timing import captured, milliseconds
from training_step import figures, random_text, steady, trainer

from elman_core.training.optim.schedule_free import ScheduleFree

MODELS = "e1@1280x6,e42@1664x6,e88:h32n32@1536x8"
TIMES, REPLAYS = 10, 10
NEEDED = 28
"""Bytes a parameter: weight, gradient and two more tensors read, three written."""


def updates(params: list[torch.nn.Parameter]) -> dict[str, torch.optim.Optimizer]:
    """Each optimizer over the same parameters, as training makes it."""
    lr, betas, device = 1e-4, (0.9, 0.95), params[0].device
    theirs = AdamWScheduleFree(params, lr=lr, betas=betas)
    theirs.train()
    return {
        "adamw": torch.optim.AdamW(
            params, lr=torch.tensor(lr, device=device), betas=betas, fused=True, capturable=device.type == "cuda"
        ),
        "schedulefree": ScheduleFree([{"params": params}], lr, betas),
        "schedulefree, the package's": theirs,
    }


def alone(model: str) -> list[dict[str, Any]]:
    """A row for each optimizer."""
    params = [torch.nn.Parameter(torch.randn(s, device="cuda")) for s in shapes_of(model)]
    for p in params:
        p.grad = torch.randn_like(p)
    count, rows = sum(p.numel() for p in params), []
    for name, optimizer in updates(params).items():
        graph = captured(optimizer.step, TIMES)
        ms = statistics.median(milliseconds(graph.replay, REPLAYS)) / TIMES
        moved = round(NEEDED * count / ms / 1e9, 2)
        rows.append({"model": model, "parameters": count, "optimizer": name, "ms": round(ms, 4), "tb_s": moved})
        print(f"{model:22}{name:30}{ms:8.3f} ms {moved:6.2f} TB/s", flush=True)
        graph.reset()
    return rows


def step(model: str, optimizer: str, batch: int, steps: int, text: Path) -> dict[str, Any]:
    """The whole step."""
    with trainer(model, "graph", batch, 512, "cuda", text, optimizer=optimizer) as made:
        ms = steady(made, 5, steps)
    found = {"model": model, "optimizer": optimizer, "B": batch, **figures(ms, batch * 512)}
    print(f"{model:22}{optimizer:14}{found['tok_s']:>12,} tok/s", flush=True)
    return found | {"fastest_over_median": round(statistics.median(ms) / min(ms), 3)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/optimizers_h200.json"))
    parser.add_argument("--commit", default=commit())
    given = parser.parse_args(argv)
    models = given.models.split(",")
    rows = [row for model in models for row in alone(model)]
    with tempfile.TemporaryDirectory() as folder:
        text = random_text(Path(folder))
        steps = [step(m, o, given.batch, given.steps, text) for m in models for o in ("adamw", "schedulefree")]
    made = {"what": "updates of optimizers, alone and in a step", **facts(given.commit), "alone": rows, "step": steps}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(made, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
