"""What `elman bench` and `elman jobs` share: the places, the signals, the exit code."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from elman_core.experiments.job import Executor, Job, State
    from elman_core.experiments.scheduler import Scheduler

Gpus = Annotated[str, typer.Option(help="auto, none, or numbers as nvidia-smi shows them, such as 0,2-5, or UUIDs.")]
Avoid = Annotated[str, typer.Option(help="GPUs to stay off, written likewise.")]
Slots = Annotated[int | None, typer.Option(min=1, help="Jobs at once where there is no GPU; by default one a core.")]
On = Annotated[str, typer.Option(metavar="local|ray", help="This machine, or the Ray cluster that it belongs to.")]
Timeout = Annotated[float | None, typer.Option(min=0, help="Minutes after which a job is stopped; none by default.")]
Again = Annotated[bool, typer.Option("--again", help="Run the jobs that failed once more.")]

_CODES = {"oom": 3, "diverged": 4, "timeout": 6}


@dataclass(frozen=True)
class Places:
    """Where jobs run: what runs them, in words, and whether each has a GPU."""

    executor: Executor
    words: str
    gpus: bool

    @property
    def env(self) -> dict[str, str]:
        """On a GPU a training that is to be compared runs its kernel or fails: nobody times plain PyTorch by accident."""
        return {"ELMAN_KERNELS": os.environ.get("ELMAN_KERNELS", "require")} if self.gpus else {}


def places(on: str, gpus: str, avoid: str, slots: int | None) -> Places:
    """The places of this machine or of the Ray cluster.

    Raises:
        ConfigError: flags that do not go together, GPUs that are not there, no cluster.
    """
    from elman_core.registry import ConfigError

    if on == "local":
        return local_places(gpus, avoid, slots)
    if on != "ray":
        raise ConfigError(f"--on takes local or ray, not {on!r}")
    if gpus not in ("auto", "none") or avoid or slots is not None:
        raise ConfigError(
            "on a Ray cluster, Ray chooses the places: --gpus takes auto or none there, --avoid and --slots nothing"
        )
    from elman_core.experiments.on_ray import RayExecutor

    executor = RayExecutor(gpus=None if gpus == "auto" else False)
    return Places(executor, executor.words, executor.uses_gpus)


def local_places(gpus: str, avoid: str, slots: int | None) -> Places:
    """The places of this machine.

    Raises:
        ConfigError: GPUs that are not there, or a driver that cannot be asked.
    """
    from elman_core.experiments.gpus import choose
    from elman_core.experiments.local import LocalExecutor
    from elman_core.experiments.nvml import monitor
    from elman_core.experiments.slots import CpuSlots, GpuSlots
    from elman_core.registry import ConfigError

    driver = monitor()
    found = driver.gpus()
    chosen = choose(found, gpus, avoid, os.environ.get("CUDA_VISIBLE_DEVICES")) if found or gpus != "auto" else []
    if chosen and slots is not None:
        raise ConfigError("--slots divides the CPU, and there are GPUs: each takes one job; --gpus none uses the CPU")
    if chosen:
        names = ", ".join(f"{gpu.index} ({gpu.name})" for gpu in chosen)
        return Places(LocalExecutor(GpuSlots(chosen, driver), driver), f"one job on each of GPU {names}", True)
    if found and gpus != "none":
        raise ConfigError(
            "no GPU is left to use: see --gpus, --avoid and CUDA_VISIBLE_DEVICES; --gpus none uses the CPU"
        )
    places = CpuSlots(slots)
    threads = f"{places.threads} thread{'s' if places.threads > 1 else ''}"
    words = f"{places.count} job{'s' if places.count > 1 else ''} at once on the CPU, {threads} each"
    return Places(LocalExecutor(places), words, False)


def carry_out(
    jobs: Sequence[Job], executor: Executor, totals: Mapping[str, int | None], again: bool, errors: bool
) -> tuple[list[State], int]:
    """Run jobs to their end, showing how far they are; returns their states and the signal that stopped it, or 0."""
    from elman_core.experiments.scheduler import Scheduler

    from ._board import Board

    board = Board(jobs, totals, errors)
    scheduler = Scheduler(jobs, executor, board, again=again)
    with _signals(scheduler) as received, board.shown():
        states = scheduler.run()
    return states, received[0] if received else 0


@contextmanager
def _signals(scheduler: Scheduler) -> Iterator[list[int]]:
    """The first Ctrl-C or SIGTERM lets jobs save; the second kills them."""
    received: list[int] = []

    def note(signum: int, _frame: Any) -> None:
        received.append(signum)
        scheduler.interrupt()

    before = {s: signal.signal(s, note) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


def exit_code(states: Sequence[State], signum: int = 0) -> int:
    """0 if every job is ok; 128 + the signal that ended the scheduler; 3, 4 or 6 if all that failed ran out of memory,
    diverged or took too long; else 1.
    """
    if signum:
        return 128 + signum
    codes = {_CODES.get(state.status.partition("@")[0], 1) for state in states if not state.ok}
    return 0 if not codes else codes.pop() if len(codes) == 1 else 1
