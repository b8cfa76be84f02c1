"""Bits per byte of held-out text with the weights of the shipped checkpoints in float32, in bfloat16, and rounded to int8.

ELMAN_TEXT names the text that they were trained on (checkpoints/README.md says how to make it); its held-out part is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from harness import Row, Setting

from elman_core.data import ByteFile
from elman_core.data.sampling import heldout_windows
from elman_core.data.split import split
from elman_core.training.evaluate import on_windows

from .decode_cpu import DTYPES, stored

MODELS = ("pretrained/e88-small", "pretrained/e42-small")
WINDOW, MOST = 512, 2**17


def rows(setting: Setting) -> Iterator[Row]:
    path = Path(os.environ.get("ELMAN_TEXT", ""))
    if setting.tiny:
        path = setting.folder / "text"
        path.write_bytes(bytes(range(256)) * 64)
    if not path.is_file():
        raise ValueError("ELMAN_TEXT must name the text of the checkpoints: checkpoints/README.md makes it")
    file = ByteFile(path)
    held = heldout_windows(file, split(file.size), WINDOW, MOST)
    for name in ("e42@64x1",) if setting.tiny else MODELS:
        for dtype in DTYPES:
            if not setting.wants(model=name, dtype=dtype):
                continue
            with torch.inference_mode():
                found = on_windows(stored(name, dtype, setting), held, 8)
            yield {
                "model": name, "dtype": dtype, "bits_per_byte": round(found["bits_per_byte"], 5), "bytes": found["bytes"],
                "text": path.name, "window": WINDOW,
            }  # fmt: skip
