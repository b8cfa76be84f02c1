"""Decoding on a CPU, one text, sampled as by `elman generate`: a program that repeats a step, beside plain PyTorch.

Both take turns in one process, so that other work on the machine slows both. bytes_cpu_s: bytes per second of processor time,
which other processes disturb less. load: runnable processes, averaged over the last minute.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator

import torch
from elman_megakernel.steps import recorder as programs
from elman_megakernel.steps.recorder import CpuRecorder
from harness import Row, Setting

from elman_core.cli.generate import SMALL
from elman_core.generation import decoder, generate_bytes, round_to_int8
from elman_core.kernels import launch
from elman_core.model import LadderForCausalLM
from elman_core.model.checkpoint import load_checkpoint

from .decode import HOW, PROMPT, SKIPPED, build

MODELS = ("pretrained/e88-small", "e42@1536x6")
DTYPES = ("float32", "bfloat16", "int8")


def rows(setting: Setting) -> Iterator[Row]:
    module = launch.opened(programs.extension(), programs.FAMILY)
    for name in ("e42@16x1",) if setting.tiny else MODELS:
        for dtype in DTYPES:
            if not setting.wants(model=name, dtype=dtype):
                continue
            model = stored(name, dtype, setting)
            parameters = sum(p.numel() for p in model.parameters())
            torch.set_num_threads(1 if parameters < SMALL else os.cpu_count() or 1)  # as `elman generate` does
            made: dict[str, list[tuple[float, float]]] = {"plain": [], "program": []}
            for _ in range(setting.repeats):
                for who, found in made.items():
                    found.append(
                        rate(model, CpuRecorder(module) if who == "program" else None, 8 if setting.tiny else 128)
                    )
            for who, found in made.items():
                walls, processors = zip(*found, strict=True)
                yield {
                    "model": name, "dtype": dtype, "who": who, "parameters": parameters,
                    "threads": torch.get_num_threads(), "bytes_s": round(statistics.median(walls)),
                    "highest": round(max(walls)), "bytes_cpu_s": round(statistics.median(processors)),
                    "load": round(os.getloadavg()[0], 1),
                }  # fmt: skip


def stored(name: str, dtype: str, setting: Setting) -> LadderForCausalLM:
    """A checkpoint, or a random model of this size, as `elman generate --dtype` loads it."""
    wide = "float32" if dtype == "int8" else dtype
    model = load_checkpoint(name, dtype=wide) if "/" in name else build(name, setting).to(getattr(torch, wide))
    if dtype == "int8":
        round_to_int8(model)
    return model


def rate(model: object, recorder: CpuRecorder | None, count: int) -> tuple[float, float]:
    """Bytes per second, and per second of processor time, after the first bytes."""
    real = decoder.recorder_for
    decoder.recorder_for = lambda *_: recorder  # type: ignore[assignment,return-value]
    try:
        texts = generate_bytes(model, PROMPT, max_new_bytes=SKIPPED + count, how=HOW, seed=0)  # type: ignore[arg-type]
        for _ in range(SKIPPED):
            next(texts)
        wall, processor = time.perf_counter(), time.process_time()
        came = sum(1 for _ in texts)
        return came / (time.perf_counter() - wall), came / (time.process_time() - processor)
    finally:
        decoder.recorder_for = real
