"""How long the sums of a model's gradients over the GPUs of one machine take inside a CUDA graph, in several ways.

    python benchmarks/gradient_sums.py [--gpus 2,4] [--models e1@1280x6,…] [--out benchmarks/results/gradient_sums_h200.json]

flat N     copies to buckets of N MB, their sums, a division, copies back
each       a sum for every gradient, where it lies
grouped    the same as one group, NCCL dividing
core       `elman_core.training.ranks.tensors.average`, which training uses: as grouped, small gradients copied together

Milliseconds: a graph holds the sums of all gradients of the model (float32, random) ten times; the median of ten replays by
events, of the rank on which it is longest. Bus: bytes that a ring moves through every link, 2 (n - 1) / n of the gradients,
over that time. Each way's result is compared with the mean on every rank. --out keeps its rows of other numbers of GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from machine import commit, facts
from timing import milliseconds
from torch import Tensor

from elman_core.training.ranks.tensors import average, means

MODELS = "e1@1280x6,e42@1536x6,e88:h32n16@1536x20"
TIMES, REPLAYS = 10, 10


def shapes_of(model: str) -> list[torch.Size]:
    """Of all parameters of VARIANT[:PRESET]@WIDTHxDEPTH."""
    from elman_core import LadderConfig, LadderForCausalLM

    variant, size = model.split("@")
    width, depth = (int(n) for n in size.split("x"))
    with torch.device("meta"):
        made = LadderForCausalLM(LadderConfig(variant=variant, hidden_size=width, num_hidden_layers=depth))
    return [p.shape for p in made.parameters()]


def flat(limit: int) -> Callable[[Sequence[Tensor], int], None]:
    """Sums of neighbours that have `limit` bytes together, or are the last."""

    def sums(grads: Sequence[Tensor], ranks: int) -> None:
        group: list[Tensor] = []
        for i, grad in enumerate(grads):
            group.append(grad)
            if sum(g.nbytes for g in group) < limit and i + 1 < len(grads):
                continue
            joined = torch.cat([g.flatten() for g in group])
            dist.all_reduce(joined)
            joined /= ranks
            parts = joined.split([g.numel() for g in group])
            torch._foreach_copy_(group, [p.view_as(g) for p, g in zip(parts, group, strict=True)])
            group = []

    return sums


def each(grads: Sequence[Tensor], _ranks: int) -> None:
    for grad in grads:
        dist.all_reduce(grad, dist.ReduceOp.AVG)


def grouped(grads: Sequence[Tensor], ranks: int) -> None:
    means(list(grads), ranks)


WAYS: dict[str, Callable[[Sequence[Tensor], int], None]] = {
    "flat 25": flat(25 * 2**20),
    "flat 256": flat(256 * 2**20),
    "each": each,
    "grouped": grouped,
    "core": average,
}


def timed(way: Callable[[Sequence[Tensor], int], None], shapes: Sequence[torch.Size], ranks: int) -> dict[str, Any]:
    """Milliseconds of all sums on this rank, and the largest error of a mean relative to the numbers that went in."""
    rank, device = dist.get_rank(), torch.device("cuda", torch.cuda.current_device())

    def drawn(seed: int) -> list[Tensor]:
        generator = torch.Generator(device).manual_seed(seed)
        return [torch.randn(shape, device=device, generator=generator) for shape in shapes]

    grads = drawn(rank)
    truth = [torch.stack(both).double().mean(0) for both in zip(*map(drawn, range(ranks)), strict=True)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        way(grads, ranks)
        error = max(float((g - t).abs().max()) for g, t in zip(grads, truth, strict=True))
        del truth
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(TIMES):
                way(grads, ranks)
        ms = statistics.median(milliseconds(graph.replay, REPLAYS, 0, before=dist.barrier)) / TIMES
    graph.reset()
    return {"ms": ms, "error": error}


def rank_of(rank: int, ranks: int, models: list[str], store: str, into: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=ranks)
    rows = []
    for model in models:
        shapes = shapes_of(model)
        nbytes = 4 * sum(s.numel() for s in shapes)
        for name, way in WAYS.items():
            row: dict[str, Any] = {"model": model, "gpus": ranks, "way": name, "megabytes": round(nbytes / 1e6, 1)}
            found: list[Any] = [None] * ranks
            dist.all_gather_object(found, timed(way, shapes, ranks))
            ms = max(f["ms"] for f in found)
            bus = 2 * (ranks - 1) / ranks * nbytes / ms / 1e6
            rows.append({**row, "ms": round(ms, 4), "bus_gb_s": round(bus, 1), "error": max(f["error"] for f in found)})
            if rank == 0:
                print(
                    f"{model:22}{ranks:3} GPUs  {name:9}{ms:8.3f} ms {bus:7.1f} GB/s  error {rows[-1]['error']:.1e}",
                    flush=True,
                )
    if rank == 0:
        Path(into).write_text(json.dumps(rows))
    dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", default="2,4")
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gradient_sums.json"))
    parser.add_argument("--commit", default=commit())
    given = parser.parse_args(argv)
    began = time.monotonic()
    for ranks in map(int, given.gpus.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            into = Path(folder, "rows.json")
            words = (ranks, given.models.split(","), str(Path(folder, "store")), str(into))
            mp.spawn(rank_of, args=words, nprocs=ranks)  # type: ignore[no-untyped-call]
            rows = json.loads(into.read_text())
        old = json.loads(given.out.read_text())["rows"] if given.out.exists() else []
        made = {
            "what": "sums of gradients over the GPUs of one machine, in a CUDA graph",
            **facts(given.commit),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith("NCCL_")},
            "rows": [*(r for r in old if r["gpus"] != ranks), *rows],
        }
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(made, indent=1) + "\n")
    print(f"{time.monotonic() - began:.0f} s, written to {given.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
