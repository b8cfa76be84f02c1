"""Which part of training on several GPUs does not work: a staircase of stages, each in new processes, in under a minute.

    python benchmarks/two_ranks.py [--out FOLDER] [--device cuda] [--ranks 2] [--limit 25] [--stages meet,sum,…] [--list]

one      one rank alone trains on one GPU, which compiles and verifies the kernel that the others need (--first seconds)
meet     the ranks find each other and exchange an object (gloo, on the CPU)
sum      a sum of tensors on the devices (NCCL, or gloo on CPUs)
graph    the same sum in a CUDA graph, replayed, and destroyed before the ranks part
eager    eight steps of a small E42 with DDP, gradients summed while the backward runs
auto     the same with the whole step as one CUDA graph, sums included
fsdp     the same with the weights shared out
wait     not run unless asked for: the second rank never comes to the sum
kept     not run unless asked for, and is to hang: the graph of `graph` is kept while the ranks part, and NCCL waits for it

The processes are forked from one that has imported everything; so a stage costs what CUDA and NCCL take to start. A stage that
is not done after --limit seconds prints the stacks of all threads of every rank and ends; it has in the table how far each rank
came and what it waited in, and in FOLDER/STAGE.log all that it wrote. The stages after it are run all the same. Leaves with 1
if a stage failed. With --device cpu (gloo) it shows that the stages run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from ranks import Ended, Launcher  # noqa: E402
from stacks import innermost, where  # noqa: E402

MEET = """
import os, time, torch
import torch.distributed as dist
from elman_core.training.ranks.group import join, leave
from elman_core.training.ranks.launch import reached
ranks = join()
device = torch.device("cuda", ranks.local) if DEVICE == "cuda" else torch.device("cpu")
assert ranks.gather(ranks.rank) == list(range(ranks.size))
reached("an object exchanged")
"""
SUM = (
    MEET
    + """
x = torch.full((2**20,), float(ranks.rank + 1), device=device)
dist.all_reduce(x)
assert x[0].item() == x[-1].item() == sum(range(1, ranks.size + 1))
reached("a sum")
"""
)
GRAPH = (
    SUM
    + """
from elman_core.model.graph import CudaRecorder
if DEVICE == "cuda":
    recorder, x = CudaRecorder(device), torch.ones(2**20, device=device)
    def run():
        dist.all_reduce(x)
        return x
    with recorder.work():
        run()
        recording = recorder.record(run)
        reached("recorded")
        for _ in range(5):
            recording()
    torch.cuda.synchronize()
    assert x[0].item() == float(ranks.size) ** 6
    reached("replayed")
"""
)
RELEASED = GRAPH + "\nif DEVICE == 'cuda': recording.release()\n"
WAIT = MEET + "\nif ranks.rank: time.sleep(3600)\ndist.all_reduce(torch.ones(1, device=device))\n"
BARE = {"meet": MEET, "sum": SUM, "graph": RELEASED, "kept": GRAPH, "wait": WAIT}
TRAINED = {
    "one": (),
    "eager": ("train.parallel=ddp", "train.launch=eager"),
    "auto": ("train.parallel=ddp",),
    "fsdp": ("train.parallel=fsdp",),
}
ASKED_FOR = ("wait", "kept")
STAGES = ("one", *(name for name in (*BARE, *TRAINED) if name not in (*ASKED_FOR, "one")))
END = "\nleave()\nos._exit(0)\n"


def sets(stage: str, device: str, ranks: int) -> list[str]:
    """The settings of a stage that trains."""
    given = [
        "model.hidden_size=256", "model.num_hidden_layers=2", f"train.batch_size={16 * ranks}", "train.chunk_size=128",
        "train.steps=8", "train.warmup=1", "train.eval_every=0", "data.eval_bytes=65536", f"train.device={device}",
        *TRAINED[stage],
    ]  # fmt: skip
    return [word for one in given for word in ("--set", one)]


def words(stage: str, device: str, ranks: int, text: Path, run: Path) -> tuple[list[str], str]:
    """The line that every rank runs, and the Python before it."""
    if stage in TRAINED:
        return ["train", "e42", "--data", str(text), "--out", str(run), *sets(stage, device, ranks)], ""
    return ["list"], f"DEVICE = {device!r}\n{BARE[stage]}{END}"


def said(ended: Ended) -> str:
    """All that the ranks have written, one after the other."""
    parts = zip(ended.out, ended.err, ended.codes, strict=True)
    return "".join(f"--- rank {r}, exit code {c}\n{out}\n{err}\n" for r, (out, err, c) in enumerate(parts))


def judged(stage: str, ended: Ended, run: Path) -> str:
    """ "" if the stage did what it should, else what went wrong."""
    text = said(ended)
    if innermost(text):
        return f"not done in time: {where(text)}"
    if any(ended.codes):
        lines = [line for err in ended.err for line in err.splitlines() if line.strip() and " after " not in line]
        return f"exit codes {ended.codes}: {lines[-1] if lines else 'they said nothing'}"
    if stage in TRAINED:
        manifest = json.loads((run / "manifest.json").read_text())
        if manifest["status"] != "ok":
            return f"the run is {manifest['status']}"
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("two_ranks"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--limit", type=float, default=25, help="seconds for a stage")
    parser.add_argument("--first", type=float, default=90, help="seconds for the stage `one`")
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--list", action="store_true", help="say what would run")
    asked = parser.parse_args(argv)
    stages = [stage for stage in asked.stages.split(",") if stage]
    if unknown := set(stages) - {*BARE, *TRAINED}:
        raise SystemExit(f"no stage {sorted(unknown)[0]!r}: choose among {', '.join((*BARE, *TRAINED))}")
    if asked.list:
        limits = {stage: asked.first if stage == "one" else asked.limit for stage in stages}
        print("\n".join(f"{stage:6} at most {limit:.0f} s" for stage, limit in limits.items()))
        return 0
    asked.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.random.default_rng(0).integers(0, 256, 2**20, dtype=np.uint8).tofile(folder / "text")
        began = time.monotonic()
        launcher = Launcher(folder)
        for stage in stages:
            ranks, limit = (1, asked.first) if stage == "one" else (asked.ranks, asked.limit)
            line, prelude = words(stage, asked.device, ranks, folder / "text", folder / stage)
            ended = launcher.run(ranks, line, prelude, limit, ELMAN_PHASES="1")
            (asked.out / f"{stage}.log").write_text(said(ended), encoding="utf-8")
            wrong = judged(stage, ended, folder / stage)
            failed += bool(wrong) and stage != "kept"
            print(f"{time.monotonic() - began:5.1f} s  {stage:6} {wrong or 'ok'}", flush=True)
        launcher.close()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
