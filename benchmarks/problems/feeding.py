"""Whole trainings fed from three packed files, under torch's profiler: tok/s, and how long no kernel ran.

The files have weights 0.5, 0.3 and 0.2. The kernels of steps from the middle to nine tenths of the run, in CUDA graphs, are
examined: `idle_percent` of that time none ran, `gaps_over_5_us_percent` of it is in longer gaps, and the longest gap is
`longest_gap_us`. A step that waits for its text has a long gap. --only names rows: bytes, masks, classes.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

from harness import Row, Setting
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from elman_core.metrics import METRICS
from elman_core.registry import parse_size
from elman_core.training.settings import from_dict
from elman_core.training.start import start

WEIGHTS = (0.5, 0.3, 0.2)
ROWS = {"masks": "e1@640x6", "bytes": "e42@512x6", "classes": "e1@128x2"}


def tokenizer(words: list[str], folder: Path) -> None:
    """A token for each word; with 70,000 words, an id takes four bytes."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    end, unknown = "<|endoftext|>", "<unk>"
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate([end, unknown, *words])}, unk_token=unknown))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens([end])
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token=end, unk_token=unknown).save_pretrained(folder)


def packed(kind: str, folder: Path, documents: int, count: int) -> list[str]:
    """Three packed files with words out of `count`, each file with its weight."""
    draw = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = list(dict.fromkeys("".join(draw.choices(letters, k=draw.randint(3, 9))) for _ in range(count)))
    folder.mkdir(exist_ok=True)
    more = []
    if kind == "classes":
        tokenizer(words, folder / "tokenizer")
        more = ["--tokenizer", str(folder / "tokenizer")]
    made = []
    for i, weight in enumerate(WEIGHTS):
        lines, out = folder / f"{i}.jsonl", folder / f"{i}.bin"
        with lines.open("w") as file:
            for _ in range(documents):
                texts = {"prompt": 30, "completion": 150} if kind == "masks" else {"text": 40 if more else 200}
                document = {name: " ".join(draw.choices(words, k=n)) for name, n in texts.items()}
                file.write(json.dumps(document) + "\n")
        command = [sys.executable, "-m", "elman_core", "data", "pack", str(lines), "--out", str(out), *more]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        made.append(f"{out}:{weight}")
    return made


def gaps(seen: profile) -> Row:
    spans = sorted(
        (e.time_range.start, e.time_range.end) for e in seen.events() or () if e.device_type == DeviceType.CUDA
    )
    begin, until = spans[len(spans) // 2][0], spans[len(spans) * 9 // 10][0]
    busy, end, waits = 0.0, begin, [0.0]
    for first, last in spans:
        if begin <= first < until:
            waits.append(max(0.0, first - end))
            busy += max(0.0, last - max(first, end))
            end = max(end, last)
    whole = end - begin
    return {
        "idle_percent": round(100 - 100 * busy / whole, 2),
        "longest_gap_us": round(max(waits), 1),
        "gaps_over_5_us_percent": round(100 * sum(wait for wait in waits if wait > 5) / whole, 2),
    }


def measured(setting: Setting, kind: str, model: str) -> Row:
    variant, width, depth = parse_size(model)
    folder = setting.folder / kind
    documents, words = (200, 1000) if setting.tiny else (20_000 if kind == "classes" else 3000, 71_000)
    rows, length, steps = (4, 64, 6) if setting.tiny else (64, 512, 300)
    settings = from_dict({
        "model": {"variant": variant, "hidden_size": width, "num_hidden_layers": depth},
        "data": {"path": packed(kind, folder, documents, words)},
        "train": {
            "batch_size": rows, "chunk_size": length, "steps": steps, "device": str(setting.device), "save_every": 0,
            "eval_every": 0,
        },
    })  # fmt: skip
    cuda = setting.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) if cuda else nullcontext() as seen:
        made = start(settings, folder / "run", quiet=True)
        made.fit()
    lines = [json.loads(line) for line in (folder / "run" / METRICS).read_text().splitlines()]
    rates = [line["tok_s"] for line in lines if "tok_s" in line]
    return {"tok_s": round(statistics.median(rates)), "ran": made._how()["mode"], **(gaps(seen) if seen else {})}


def rows(setting: Setting) -> Iterator[Row]:
    for kind, model in ROWS.items():
        model = "e1@16x1" if setting.tiny else model
        if setting.wants(data=kind):
            yield setting.row(
                lambda k=kind, m=model: measured(setting, k, m), data=kind, model=model, who=kind, kind="ours"
            )  # type: ignore[misc]
