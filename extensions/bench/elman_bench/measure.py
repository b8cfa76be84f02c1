"""The process of one measurement of `elman probe`: a few steps of the real `Trainer`.

`python -m elman_bench.measure ANSWER` reads the request from standard input and writes JSON to the file ANSWER.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elman_core.extension import ElmanError, Settings, errors, from_dict, ran_out

from . import memory

WARMUP = 2  # steps that are not timed: the first builds and compiles
SLOW = 10.0  # seconds of a first step on a CPU, which compiles nothing, from which one step of each kind is enough


@dataclass(frozen=True)
class Measurement:
    """A few steps at one batch size.

    Attributes:
        batch_size, chunk_size, accumulate: rows, bytes per row, micro-batches. steps: number of timed steps.
        tok_s: bytes per second, median of the steps. step_seconds: of one such step.
        first_step_seconds: of the first step, with building and compiling.
        peak_memory: bytes allocated by torch on a GPU; resident memory of the process on the CPU.
        idle_memory: the same before the first step: the weights, and on the CPU also the libraries.
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


@dataclass(frozen=True)
class Probe:
    """A measurement and its subject: the exact number of parameters, the device in words, precision and back ends."""

    parameters: int
    device: str
    precision: str
    backends: list[str]
    measurement: Measurement


def main() -> None:
    """Read the request from standard input; write the answer to the file in the only argument."""
    asked = json.load(sys.stdin)
    answer = Path(sys.argv[1])
    try:
        result = _measure(from_dict(asked["settings"]), asked["seconds"], Path(asked["folder"]))
    except Exception as error:
        kind, text = _translate(error)
        result = {"error": text, "kind": kind}
    answer.write_text(json.dumps(result), encoding="utf-8")


def _measure(settings: Settings, seconds: float, folder: Path) -> dict[str, Any]:
    import torch

    from elman_core.extension import backends, memory_in_use, pick_device, start

    device = pick_device(settings.train.device)
    on_gpu = device.type == "cuda"
    trainer = start(settings, folder / "run", quiet=True)
    try:
        idle = memory_in_use(trainer.device)
        walls = _steps(trainer, 1, 0.0)
        first_seconds = _seconds(trainer, walls)
        slow = not on_gpu and first_seconds > SLOW
        walls += _steps(trainer, 0 if slow else WARMUP - 1, 0.0)
        while not trainer.compute.ready:  # a step that is compiled or captured takes more of them
            walls += _steps(trainer, 1, 0.0)
        repeats = 1 if slow else 3
        timed = _steps(trainer, repeats if seconds else 1, seconds)
        peak = memory_in_use(trainer.device) if on_gpu else memory.resident()
    finally:
        trainer.folder.close()
    chosen = trainer.settings.train
    measured = Measurement(
        batch_size=chosen.batch_size,
        chunk_size=chosen.chunk_size,
        accumulate=chosen.accumulate,
        steps=len(timed),
        tok_s=statistics.median(line["tok_s"] for line in timed),
        step_seconds=_seconds(trainer, timed),
        first_step_seconds=first_seconds,
        peak_memory=peak,
        idle_memory=idle,
    )
    threads = torch.get_num_threads()
    on_cpu = f"cpu, {threads} thread{'s' if threads > 1 else ''}"
    name = f"{device} ({torch.cuda.get_device_name(device)})" if on_gpu else on_cpu
    parameters = sum(p.numel() for p in trainer.model.parameters())
    found = Probe(parameters, name, chosen.precision, backends(trainer.model), measured)
    return dataclasses.asdict(found)


def _steps(trainer: Any, count: int, seconds: float) -> list[dict[str, float]]:
    """At least `count` steps of the trainer, for at least `seconds`."""
    lines: list[dict[str, float]] = []
    began = time.perf_counter()
    while len(lines) < count or time.perf_counter() - began < seconds:
        lines.append(trainer.train_step())
    return lines


def _seconds(trainer: Any, lines: list[dict[str, float]]) -> float:
    """Of a step with the median speed, which leaves out the filling of packed rows."""
    fill, tok_s = (statistics.median(line.get(name, 1.0) for line in lines) for name in ("fill", "tok_s"))
    return float(trainer.settings.tokens_per_step * fill / tok_s)


def _translate(error: Exception) -> tuple[str, str]:
    """The class name of the `ElmanError` for an exception, and its message."""
    if isinstance(error, MemoryError) or ran_out(error):
        return "OutOfMemoryError", "it does not fit: lower --batch or --chunk, or --set train.accumulate=2"
    if isinstance(error, ElmanError):
        kinds = [k.__name__ for k in type(error).__mro__ if getattr(errors, k.__name__, None) is k]
        return kinds[0], str(error)
    return "ElmanError", " ".join(f"{type(error).__name__}: {error}".split())


if __name__ == "__main__":
    with contextlib.suppress(OSError):  # if memory runs out, Linux ends this process and no other
        Path("/proc/self/oom_score_adj").write_text("1000")
    main()
