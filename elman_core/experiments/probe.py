"""What a training takes here: memory and tokens a second of a few steps of the real `Trainer`, and the largest batch that fits.

Every measurement is a process of its own, so that one that runs out of memory leaves nothing behind for the next.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elman_core.registry import ElmanError, OutOfMemoryError, errors
from elman_core.training.settings import Settings, from_dict

from . import memory

WARMUP = 2  # steps that are not timed: the first builds and compiles, the second allocates nothing new
ROOM = 0.9
"""Part of the free memory of a CPU's machine that a measurement may take."""
MOST_ROWS = 1 << 16


@dataclass(frozen=True)
class Measurement:
    """A few steps at one batch size.

    Attributes:
        batch_size, chunk_size, accumulate: rows, bytes a row, micro-batches. steps: timed ones.
        tok_s: bytes a second, median of the steps, as `elman train` reports it. step_seconds: of one such step.
        first_step_seconds: of the first step, with building and compiling.
        peak_memory: bytes: allocated by torch on a GPU; resident memory of the whole process on the CPU.
        idle_memory: the same before the first step: the weights, and on the CPU the libraries.
        parts: seconds of a step that data, the optimizer and the rest (forward and backward) take; None where they cannot be
            told apart, as in a step that is one graph.
    """

    batch_size: int
    chunk_size: int
    accumulate: int
    steps: int
    tok_s: float
    step_seconds: float
    first_step_seconds: float
    peak_memory: int
    idle_memory: int
    parts: dict[str, float] | None


@dataclass(frozen=True)
class Probe:
    """What was measured, and of what.

    Attributes:
        parameters: exact. device: in words. precision, backends: as a run has them.
        measurement: None if it does not fit.
    """

    parameters: int
    device: str
    precision: str
    backends: list[str]
    measurement: Measurement


@dataclass(frozen=True)
class Largest:
    """The largest batch that fits.

    Attributes:
        rows: batch size, without accumulation. probe: measured with it. tried: each batch size, and what became of it: "fits"
            or the error. limited_by: why no larger one was taken.
    """

    rows: int
    probe: Probe
    tried: dict[int, str]
    limited_by: str


def probe(settings: Settings, seconds: float = 3.0, limit: int | None = None) -> Probe:
    """Measure a training with these settings in a process of its own.

    Args:
        seconds: for the timed steps, which are at least three. limit: bytes that it may take; by default what is free.

    Raises:
        OutOfMemoryError: it does not fit. ElmanError: whatever else a training raises, as it would.
    """
    asked = {"settings": settings.to_dict(), "seconds": seconds, "limit": limit or _limit(settings)}
    with tempfile.TemporaryDirectory(prefix="elman-probe-") as folder:
        answer = Path(folder) / "answer.json"
        code, said = _run([sys.executable, "-m", __name__, str(answer)], json.dumps({**asked, "folder": folder}))
        if not answer.exists():
            raise _death(code, said, settings)
        tree = json.loads(answer.read_text(encoding="utf-8"))
    if "error" in tree:
        kind = getattr(errors, tree["kind"], ElmanError)
        raise kind(tree["error"])
    return Probe(**{**tree, "measurement": Measurement(**tree["measurement"])})


def largest(
    settings: Settings,
    first: Probe | None = None,
    seconds: float = 3.0,
    limit: int | None = None,
    say: Callable[[str], None] = lambda _: None,
    attempt: Callable[..., Probe] | None = None,
) -> Largest:
    """The largest `train.batch_size` without accumulation that trains here, to within 3 % of it: doubling, then bisection.

    Args:
        first: a probe of `settings`, if there is one already. limit: as in `probe`. say: told each attempt.
        attempt: what measures, instead of `probe`.

    Raises:
        OutOfMemoryError: not even one row fits. ElmanError: it does not train at all.
    """
    limit, attempt = limit or _limit(settings), attempt or probe
    tried: dict[int, str] = {}
    why = f"{MOST_ROWS} rows are the most that are tried"
    good, bad = 0, MOST_ROWS + 1
    rows = settings.train.batch_size
    if first is not None and settings.train.accumulate == 1:
        good, tried[rows] = rows, "fits"
        rows = min(2 * rows, MOST_ROWS)
    while bad - good > max(1, good // 32):
        try:
            attempt(_with_rows(settings, rows), 0.0, limit)
            good, tried[rows] = rows, "fits"
        except ElmanError as error:
            if rows == 1:
                raise
            bad, why = rows, "memory" if isinstance(error, OutOfMemoryError) else str(error)
            tried[rows] = "out of memory" if isinstance(error, OutOfMemoryError) else str(error)
        say(f"batch {rows}: {tried[rows]}")
        rows = min(2 * good, MOST_ROWS) if bad > MOST_ROWS else (good + bad) // 2
    return Largest(good, attempt(_with_rows(settings, good), seconds, limit), tried, why)


def _with_rows(settings: Settings, rows: int) -> Settings:
    return dataclasses.replace(settings, train=dataclasses.replace(settings.train, batch_size=rows, accumulate=1))


def _limit(settings: Settings) -> int | None:
    """Bytes for a measurement if nothing else is said: most of what is free for a CPU; None, all there is, for a GPU."""
    from elman_core.training.precision import pick_device

    if pick_device(settings.train.device).type != "cpu":
        return None  # asking a GPU here would take some of it away
    free = memory.available()
    return None if free is None else int(ROOM * free)


def _run(command: list[str], text: str) -> tuple[int, str]:
    """Run a command in a group of its own; whatever ends this process's patience ends the whole group."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, said = process.communicate(text)
    except BaseException:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    return process.returncode, said


def _death(code: int, said: str, settings: Settings) -> ElmanError:
    """What a measurement that left no answer died of."""
    if code == -signal.SIGKILL:
        return OutOfMemoryError(f"the system ended the probe at batch {settings.train.batch_size}, for want of memory")
    last = said.strip().splitlines()[-1:] or ["it said nothing"]
    return ElmanError(f"the probe's process ended with code {code}: {last[0]}")


# in the process that measures


def main() -> None:
    """Read what is asked from standard input; write the answer to the file that is the one argument."""
    asked = json.load(sys.stdin)
    answer = Path(sys.argv[1])
    try:
        result = _measure(from_dict(asked["settings"]), asked["seconds"], asked["limit"], Path(asked["folder"]))
    except Exception as error:
        kind, text = _translate(error)
        result = {"error": text, "kind": kind}
    answer.write_text(json.dumps(result), encoding="utf-8")


def _measure(settings: Settings, seconds: float, limit: int | None, folder: Path) -> dict[str, Any]:
    import torch

    from elman_core.training.display import backends
    from elman_core.training.precision import pick_device
    from elman_core.training.run import memory_in_use
    from elman_core.training.start import start

    device = pick_device(settings.train.device)
    on_gpu = device.type == "cuda"
    if limit is not None and on_gpu:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
    elif limit is not None:
        memory.limit(max(0, limit - memory.resident()))  # the libraries have their part of it
    trainer = start(settings, folder / "run", quiet=True)
    try:
        idle = memory_in_use(trainer.device)
        walls = _steps(trainer, WARMUP, 0.0)
        timed = _steps(trainer, 3 if seconds else 1, seconds)
        peak = memory_in_use(trainer.device) if on_gpu else memory.resident()
        parts = _parts(trainer) if seconds else None
    finally:
        trainer.folder.close()
    chosen = trainer.settings.train
    tok_s = statistics.median(line["tok_s"] for line in timed)
    measured = Measurement(
        batch_size=chosen.batch_size,
        chunk_size=chosen.chunk_size,
        accumulate=chosen.accumulate,
        steps=len(timed),
        tok_s=tok_s,
        step_seconds=trainer.settings.tokens_per_step / tok_s,
        first_step_seconds=trainer.settings.tokens_per_step / walls[0]["tok_s"],
        peak_memory=peak,
        idle_memory=idle,
        parts=parts,
    )
    name = f"{device} ({torch.cuda.get_device_name(device)})" if on_gpu else f"cpu, {torch.get_num_threads()} threads"
    parameters = sum(p.numel() for p in trainer.model.parameters())
    found = Probe(parameters, name, chosen.precision, backends(trainer.model), measured)
    return dataclasses.asdict(found)


def _steps(trainer: Any, count: int, seconds: float) -> list[dict[str, float]]:
    """Steps of the trainer: at least `count`, and as many as `seconds` hold."""
    lines: list[dict[str, float]] = []
    began = time.perf_counter()
    while len(lines) < count or time.perf_counter() - began < seconds:
        lines.append(trainer.train_step())
    return lines


def _parts(trainer: Any) -> dict[str, float] | None:
    """Medians over three further steps, waiting for the device before and after each part; see `Measurement.parts`."""
    rows = []
    for _ in range(3):
        with _timed(trainer, trainer.windows, "batch") as data, _timed(trainer, trainer.optimizer, "step") as update:
            _wait(trainer.device)
            began = time.perf_counter()
            trainer.train_step()
            _wait(trainer.device)
            whole = time.perf_counter() - began
        if not data or not update:
            return None  # read ahead, or part of a graph
        rows.append((sum(data), whole - sum(data) - sum(update), sum(update)))
    data_s, middle, update_s = (statistics.median(column) for column in zip(*rows, strict=True))
    return {"data": data_s, "forward_backward": middle, "optimizer": update_s}


@contextmanager
def _timed(trainer: Any, owner: Any, method: str) -> Iterator[list[float]]:
    """Inside, calls of `owner.method` from this thread are timed; yields the list of their seconds."""
    seconds: list[float] = []
    inner, caller = getattr(owner, method), threading.current_thread()

    def outer(*arguments: Any, **keywords: Any) -> Any:
        if threading.current_thread() is not caller:
            return inner(*arguments, **keywords)
        _wait(trainer.device)
        began = time.perf_counter()
        try:
            return inner(*arguments, **keywords)
        finally:
            _wait(trainer.device)
            seconds.append(time.perf_counter() - began)

    setattr(owner, method, outer)
    try:
        yield seconds
    finally:
        owner.__dict__.pop(method, None)


def _wait(device: Any) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def _translate(error: Exception) -> tuple[str, str]:
    """The name of the `ElmanError` that an exception is, and what it says."""
    import torch

    if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error):
        return "OutOfMemoryError", "it does not fit: lower --batch or --chunk, or --set train.accumulate=2"
    if isinstance(error, ElmanError):
        kinds = [k.__name__ for k in type(error).__mro__ if getattr(errors, k.__name__, None) is k]
        return kinds[0], str(error)
    return "ElmanError", " ".join(f"{type(error).__name__}: {error}".split())


if __name__ == "__main__":
    main()
