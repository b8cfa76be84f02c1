"""Packing and feeding on a CPU: MB a second that `elman data pack` packs, beside Hugging Face's `datasets` alone, and tokens a
second that the reading thread makes into batches, from three packed files.

MB count uncompressed JSON lines with texts of 2.6 kB. `datasets` parses the same file into Arrow, shuffles it, and writes it
in the new order (`Dataset.from_json`, `shuffle`, `save_to_disk`), with as many processes. Both are also given per second of
processor time (`mb_cpu_s`), which other programs disturb less. Each of eight ranks is a process that makes its rows of every
batch, timed without its start; `private` is a rank's own memory in MiB, `shared` that of pages of files and libraries.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import torch
from harness import Row, Setting

from elman_core.data import Mixture, TrainingWindows, open_file, split
from elman_core.training.prefetch import Prefetcher

ROWS, LENGTH, WEIGHTS = 256, 512, (0.6, 0.3, 0.1)


def write_lines(path: Path, size: int) -> None:
    """About `size` bytes of JSON lines."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(5000)]
    halves = [" ".join(draw.choices(words, k=200)) for _ in range(2000)]
    with path.open("w") as file:
        i = 0
        while file.tell() < size:
            lines = ({"id": j, "text": f"{j} {halves[j % 2000]}\n{halves[j * 7 % 2000]}"} for j in range(i, i + 100))
            file.write("".join(json.dumps(line) + "\n" for line in lines))
            i += 100


def cpu() -> float:
    every = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in every)


def timed(run: Callable[[], object], size: int) -> Row:
    began, used = time.perf_counter(), cpu()
    run()
    wall, used = time.perf_counter() - began, cpu() - used
    return {"mb_s": round(size / wall / 1e6, 1), "mb_cpu_s": round(size / used / 1e6, 1), "seconds": round(wall, 2)}


def pack_ours(lines: Path, folder: Path) -> None:
    words = [sys.executable, "-m", "elman_core", "data", "pack", str(lines), "--out", str(folder / "packed")]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


def pack_datasets(lines: Path, folder: Path) -> None:
    from datasets import Dataset

    count = len(os.sched_getaffinity(0))
    read = Dataset.from_json(str(lines), cache_dir=str(folder / "cache"), num_proc=None)
    read.shuffle(seed=0).save_to_disk(str(folder / "saved"), num_proc=count)


def sources(width: int, folder: Path, size: int) -> list[Path]:
    """Three packed files of tokens of `width` bytes."""
    made = []
    for i in range(3):
        made.append(folder / f"{width}-{i}")
        lines = folder / f"lines-{i}.jsonl"
        if not lines.exists():
            write_lines(lines, size)
        pack_ours(lines, folder)
        for name in ("packed", "packed.json"):
            (folder / name).rename(made[-1].with_name(name.replace("packed", made[-1].name)))
        if width == 4:  # the ids of a tokenizer would take as long to make as they are many
            widen(made[-1])
    return made


def widen(path: Path) -> None:
    """The same tokens in four bytes each."""
    from elman_core.data import ByteFile
    from elman_core.data.packed import PACKED_HEADER, packed_manifest, packed_sections
    from elman_core.storage import read_json, write_json

    file, manifest = open_file(path), read_json(packed_manifest(path))
    tokens = file.windows(np.zeros(1, np.int64), file.size)[0].astype("<u4")
    ends = file.ends()
    start = packed_sections(len(tokens), "uint32", len(ends), False)[0]
    path.write_bytes((PACKED_HEADER + tokens.tobytes()).ljust(start, b"\0") + ends.tobytes())
    facts = ByteFile(path, packed=True).fingerprint()
    write_json(packed_manifest(path), manifest | {"dtype": "uint32", "vocab_size": 100_000, **facts})


def mixture(files: list[Path]) -> Mixture:
    opened = [open_file(path) for path in files]
    made = [TrainingWindows(file, split(file.size), LENGTH, ROWS, 0) for file in opened]
    return Mixture(made, WEIGHTS, ROWS, 0, streams=False)


def fed(files: list[Path], steps: int) -> Row:
    """Take batches from the reading thread as fast as it makes them."""
    reader = Prefetcher(mixture(files).batch, torch.device("cpu"))
    reader.get(0)
    began, used = time.perf_counter(), cpu()
    for step in range(1, steps + 1):
        reader.get(step)
    wall, used = time.perf_counter() - began, cpu() - used
    reader.close()
    count = steps * ROWS * LENGTH
    return {"tokens_s": round(count / wall), "tokens_cpu_s": round(count / used), "steps": steps}


def rank(
    number: int, files: list[Path], steps: int, ready: Callable[[], object], told: Callable[[tuple], None]
) -> None:
    windows = mixture(files)
    rows = np.arange(number * ROWS // 8, (number + 1) * ROWS // 8)
    windows.batch(0, rows)
    used = time.process_time()
    digest = sum(int(windows.batch(step, rows).tokens.astype(np.int64).sum()) for step in range(steps))
    used = time.process_time() - used
    memory = psutil.Process().memory_full_info()
    told((digest, memory.uss, memory.rss - memory.uss, used))
    ready()


def ranks(files: list[Path], steps: int) -> Row:
    """Eight processes make the batches of one process; raise if they differ."""
    context = multiprocessing.get_context("fork")
    barrier, queue = context.Barrier(8), context.Queue()
    every = [context.Process(target=rank, args=(r, files, steps, barrier.wait, queue.put)) for r in range(8)]
    for process in every:
        process.start()
    told = [queue.get() for _ in every]
    for process in every:
        process.join()
    windows = mixture(files)
    whole = sum(int(windows.batch(step).tokens.astype(np.int64).sum()) for step in range(steps))
    assert sum(one[0] for one in told) == whole, "the ranks read other tokens"
    count = steps * ROWS * LENGTH
    mib = [round(float(np.mean([one[i] for one in told])) / 2**20, 1) for i in (1, 2)]
    return {
        "tokens_cpu_s": round(count / sum(one[3] for one in told)),
        "private": mib[0],
        "shared": mib[1],
        "steps": steps,
    }


def rows(setting: Setting) -> Iterator[Row]:
    size, steps = (2 << 20, 4) if setting.tiny else (500 << 20, 60)
    lines = setting.folder / "lines.jsonl"
    write_lines(lines, size)
    size = lines.stat().st_size
    for who, run in (("ours", pack_ours), ("datasets", pack_datasets)):
        if not setting.wants(who=who, what="pack") or (who != "ours" and not setting.peers):
            continue
        folder = setting.folder / who
        folder.mkdir()
        kind = "ours" if who == "ours" else "peer"
        yield setting.row(lambda r=run, f=folder: timed(lambda: r(lines, f), size), what="pack", who=who, kind=kind)  # type: ignore[misc]
        shutil.rmtree(folder)
    for width in (1, 4):
        files = sources(width, setting.folder, size // 5)
        yield setting.row(lambda f=files: fed(f, steps), what="feed", who="ours", kind="ours", width=width)  # type: ignore[misc]
        yield setting.row(lambda f=files: ranks(f, steps // 4), what="8 ranks", who="ours", kind="ours", width=width)  # type: ignore[misc]
