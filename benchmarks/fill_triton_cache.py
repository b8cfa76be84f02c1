"""Compile every candidate of every autotuned Triton kernel of some models with all cores, and then choose among them.

    python benchmarks/fill_triton_cache.py gdn@640x15 mamba2@640x19 [--workers 16] [--rows 64] [--length 512] [--limit 120]
        [--no-choice]

A library that tunes its kernels compiles some hundred candidates in a row when a model is first trained, which takes minutes.
Here each of the --workers processes of a model compiles its share of every kernel's candidates into Triton's cache (all of them
on the GPU that is visible, which stands still most of that time); then one process for each model, alone, times them as usual.
What it chooses is in the cache too, as far as Triton keeps it (TRITON_CACHE_AUTOTUNING=1, which is set here: set it as well for
what is to use the cache). mamba_ssm@WIDTHxDEPTH and fla@WIDTHxDEPTH are the peers of benchmarks/training_step.py. Says how long
each part took. Leaves with 1 if a choice failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any


def share(configs: Sequence[Any], worker: int, workers: int) -> list[Any]:
    """The candidates of a worker: every `workers`-th, and at least one."""
    return [c for i, c in enumerate(configs) if i % workers == worker] or [configs[worker % len(configs)]]


@contextmanager
def compile_a_share(worker: int, workers: int) -> Iterator[None]:
    """Inside, every autotuner of this process runs its share of candidates, one after the other, and chooses nothing.

    With workers=sys.maxsize that is the first one, or the next where it does not fit.
    """
    from triton.runtime import autotuner

    run = autotuner.Autotuner.run

    def run_share(self: Any, *args: Any, **kwargs: Any) -> Any:
        every = self.configs
        mine = share(every, worker, workers)
        others, result, ran, error = [c for c in every if c not in mine], None, False, None
        try:
            for config in (*mine, *others):
                if ran and config not in mine:
                    break
                self.configs = [config]
                try:
                    result, ran = run(self, *args, **kwargs), True
                except Exception as raised:  # too much shared memory, say: the autotuner passes over it, too
                    error = raised
        finally:
            self.configs = every
        if not ran and error is not None:
            raise error
        return result

    autotuner.Autotuner.run = run_share
    try:
        yield
    finally:
        autotuner.Autotuner.run = run


def work(model: str, rows: int, length: int) -> None:
    """One step of the model, with one layer: every layer has the same kernels."""
    import torch

    sys.path.insert(0, str(Path(__file__).parent))
    from training_step import MAKERS, peer_step, trainer

    name, _, size = model.partition("@")
    if name in MAKERS:
        step = peer_step(
            MAKERS[name](int(size.partition("x")[0]), 1).to("cuda", torch.bfloat16).train(), rows, length, "cuda"
        )
        for _ in range(2):
            step()
        torch.cuda.synchronize()
        return
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text"
        text.write_bytes(os.urandom(2**22))
        with trainer(f"{name}@{size.partition('x')[0]}x1", "eager", rows, length, "cuda", text) as made:
            made.advance(2)
            if made.heldout is not None:
                made.evaluate()
            torch.cuda.synchronize()


def start(model: str, given: argparse.Namespace, worker: int | None) -> subprocess.Popen[str]:
    """A worker, or with None the process that chooses."""
    words = [sys.executable, __file__, model, "--rows", str(given.rows), "--length", str(given.length)]
    environment = {**os.environ, "ELMAN_KERNELS": "auto", "OMP_NUM_THREADS": "1"}
    if worker is None:
        environment |= {"TRITON_CACHE_AUTOTUNING": "1"}
        words += ["--choose"]
    else:
        environment |= {"FLA_CACHE_RESULTS": "0", "TRITON_CACHE_AUTOTUNING": "0"}
        words += ["--worker", str(worker), "--workers", str(given.workers)]
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(processes: dict[str, subprocess.Popen[str]], limit: float) -> dict[str, str]:
    """Wait for processes, at most until `limit` of time.monotonic; returns the last line of each that failed."""
    failed = {}
    for name, process in processes.items():
        try:
            out, _ = process.communicate(timeout=max(0.1, limit - time.monotonic()))
            if process.returncode:
                failed[name] = (out.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            failed[name] = "not done in time"
    return failed


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="NAME@WIDTHxDEPTH")
    parser.add_argument("--workers", type=int, default=16, help="of each model")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--no-choice", action="store_true", help="compile only")
    parser.add_argument("--limit", type=float, default=120, help="seconds for all of it")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--choose", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.worker is not None or given.choose:
        with nullcontext() if given.worker is None else compile_a_share(given.worker, given.workers):
            work(given.models[0], given.rows, given.length)
        return 0
    began = time.monotonic()
    limit = began + given.limit
    workers = {f"{m} worker {w}": start(m, given, w) for w in range(given.workers) for m in given.models}
    for name, why in finish(workers, limit).items():
        print(f"{name}: {why}", flush=True)
    print(f"compiled by {len(workers)} processes in {time.monotonic() - began:.0f} s", flush=True)
    failed: dict[str, str] = {}
    for model in [] if given.no_choice else given.models:
        before = time.monotonic()
        failed |= finish({model: start(model, given, None)}, limit)
        print(f"{model}: chosen in {time.monotonic() - before:.0f} s {failed.get(model, '')}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
