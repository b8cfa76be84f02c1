"""The common parts of `elman bench`, `elman jobs` and `elman demo`: slots, new folders, signals, exit codes."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from elman_bench.jobs.job import Executor, Job, State
    from elman_bench.jobs.scheduler import Scheduler
    from elman_bench.suite.plan import Plan
    from elman_bench.suite.spec import Suite

Gpus = Annotated[str, typer.Option(help="auto, none, UUIDs, or the numbers of nvidia-smi, such as 0,2-5.")]
Avoid = Annotated[str, typer.Option(help="GPUs to leave out, in the same form.")]
Slots = Annotated[
    int | None, typer.Option(min=1, help="Number of parallel jobs without a GPU; by default one per core.")
]
On = Annotated[str, typer.Option(metavar="local|ray", help="Use this machine, or its Ray cluster (elman-ray).")]
Timeout = Annotated[float | None, typer.Option(min=0, help="Minutes after which a job is stopped; by default never.")]
Seconds = Annotated[
    float | None,
    typer.Option(min=0, help="Seconds after which running jobs save and stop; the same command continues."),
]
Results = Annotated[
    Path | None,
    typer.Option(help="A file of finished runs, which are not repeated in any folder; each that ends is added."),
]
Again = Annotated[bool, typer.Option("--again", help="Run failed jobs once more.")]

_CODES = {"oom": 3, "diverged": 4, "timeout": 6}


@dataclass(frozen=True)
class Places:
    """Where jobs run: the executor, a description, and whether each job has a GPU."""

    executor: Executor
    words: str
    gpus: bool

    @property
    def env(self) -> dict[str, str]:
        """On a GPU, a run of a suite uses its kernel or fails, so plain PyTorch is never timed by accident."""
        return {"ELMAN_KERNELS": os.environ.get("ELMAN_KERNELS", "require")} if self.gpus else {}


def places(on: str, gpus: str, avoid: str, slots: int | None, share: int = 1) -> Places:
    """The slots of this machine, or of a cluster by an entry point in the group `elman.executors`.

    Args:
        share: jobs on each GPU of this machine at once. Above 1, their speeds are marked as contended.

    Raises:
        ConfigError: flags exclude each other, a GPU does not exist or its driver does not answer, or there is no such executor
            or cluster.
    """
    from elman_bench.jobs.gpus import choose, monitor
    from elman_bench.jobs.local import LocalExecutor
    from elman_bench.jobs.slots import CpuSlots, GpuSlots, threads
    from elman_core.extension import ConfigError, load_extension

    if on != "local":
        if gpus not in ("auto", "none") or avoid or slots is not None:
            raise ConfigError(
                f"with --on {on}, the cluster chooses the GPUs: --gpus takes auto or none, and --avoid and --slots cannot be "
                "used"
            )
        executor = load_extension("executors", on)(gpus=None if gpus == "auto" else False)
        return Places(executor, executor.words, executor.uses_gpus)
    driver = None if gpus == "none" else monitor()
    found = driver.gpus() if driver else []
    chosen = []
    if found or gpus != "auto":
        chosen = choose(found, gpus, avoid, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if chosen and slots is not None:
        raise ConfigError("--slots divides the CPU, but each GPU takes one job: leave out --slots, or add --gpus none")
    if driver and chosen:
        names = ", ".join(f"{gpu.index} ({gpu.name})" for gpu in chosen)
        jobs = "one job" if share == 1 else f"{share} jobs"
        executor = LocalExecutor(GpuSlots(chosen, driver, share=share), driver)
        return Places(executor, f"{jobs} on each of GPU {names}", True)
    if found:
        raise ConfigError(
            "no GPU is left: check --gpus, --avoid and CUDA_VISIBLE_DEVICES, or use the CPU with --gpus none"
        )
    cpu = CpuSlots(slots)
    jobs = f"{cpu.count} job{'s' if cpu.count > 1 else ''}"
    count = threads(cpu.threads)["OMP_NUM_THREADS"]
    each = f"{count} thread{'' if count == '1' else 's'}"
    return Places(LocalExecutor(cpu), f"{jobs} at once on the CPU, {each} each", False)


def free_folder(name: str) -> Path:
    """`runs/NAME`, or with the first number that is free."""
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(path for path in map(Path("runs").joinpath, names) if not path.exists())


def run_suite(
    suite: Suite,
    planned: Plan,
    path: Path,
    places: Places,
    timeout: float | None,
    seconds: float | None,
    results: Path | None,
    again: bool,
    errors: bool = False,
) -> tuple[list[State], int]:
    """Run the jobs of a suite in its folder, as `carry_out`. `timeout` in minutes, of a job; `seconds` of all."""
    from elman_bench.suite.folder import Folder, require_equal
    from elman_bench.suite.record import Record

    folder = Folder(path)
    try:
        record = Record(results, path) if results is not None else None
        if record is not None:
            require_equal(record.file, {id: run["job"] for id, run in record.runs.items()}, planned)
            record.restore()
        jobs = folder.suite(suite, planned, None if timeout is None else 60 * timeout, places.env)
        lengths = {job.id: job.settings.train for job in planned.jobs}
        ended = record.add if record is not None else None
        return carry_out(jobs, places.executor, lengths, again, errors, seconds, ended)
    finally:
        folder.close()


def carry_out(
    jobs: Sequence[Job],
    executor: Executor,
    lengths: Mapping[str, Any],
    again: bool,
    errors: bool,
    seconds: float | None = None,
    watch: Callable[[Sequence[State]], None] | None = None,
) -> tuple[list[State], int]:
    """Run all jobs and show their progress. Returns their states, and the signal that stopped the scheduler or 0.

    Args:
        errors: write progress to standard error. seconds: after which running jobs save and stop. watch: called with the
            states, often.
    """
    from elman_bench.jobs.scheduler import Scheduler

    from ._board import Board

    board = Board(jobs, lengths, errors, watch)
    scheduler = Scheduler(jobs, executor, board, again, seconds)
    with _signals(scheduler) as received, board.shown():
        states = scheduler.run()
    return states, received[0] if received else 0


@contextmanager
def _signals(scheduler: Scheduler) -> Iterator[list[int]]:
    """The first Ctrl-C or SIGTERM lets jobs save; the second one kills them."""
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
    if not codes:
        return 0
    return codes.pop() if len(codes) == 1 else 1
