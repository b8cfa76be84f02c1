"""Real bytes a second of whole training steps on documents of 256 bytes to 4 KB, their lengths log-uniform: in rows that are
filled with whole documents (`data.documents = "pack"`), and in rows of one document each, filled up at the right.

Both are runs of `elman train` (see `step`) with rows of 4,096; the padded ones have no `starts`, since nothing begins inside
them. `times`: packed over padded; the target is 1.65. --only names variants.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterator

import numpy as np
from harness import Row, Setting

from elman_core.data import Batch, PackedRows, uniform
from elman_core.data.rows import BLOCK, Parts
from elman_core.metrics import METRICS
from elman_core.registry import list_variants

from .step import STEPS, trainer


class PaddedRows(PackedRows):
    """Each row is one document, drawn at random."""

    def _filled(self, block: int) -> list[Parts]:
        drawn = uniform(self.seed, block, np.arange(BLOCK), below=len(self.firsts)).tolist()
        return [[(piece, 0, int(self.counts[piece]))] for piece in drawn]

    def read(self, step: int, rows: np.ndarray) -> Batch:
        return dataclasses.replace(super().read(step, rows), starts=None)


def write_documents(setting: Setting, shortest: int, longest: int, count: int) -> None:
    """A text of documents, whose lengths contain their separator."""
    draw = np.random.default_rng(0)
    lengths = np.exp(draw.uniform(np.log(shortest), np.log(longest), count)).astype(np.int64)
    text = draw.integers(32, 127, int(lengths.sum()), dtype=np.uint8)
    text[np.cumsum(lengths) - 1] = 0x1E
    setting.folder.mkdir(exist_ok=True)
    text.tofile(setting.folder / "text")


def measured(setting: Setting, model: str, batch: int, length: int) -> Row:
    launch, (warm, steps) = "auto", (1, 2) if setting.tiny else (5, STEPS)
    found: dict[str, Row] = {}
    for how in ("padded", "packed"):
        with trainer(model, launch, batch, length, setting, documents="pack") as made:
            if how == "padded":
                packed = made.windows
                made.feed.windows = PaddedRows(packed.file, packed.parts, length, batch, packed.seed)
            while not made.compute.ready:
                made.advance(1)
            made.advance(warm + steps)
            lines = [json.loads(line) for line in (made.path / METRICS).read_text().splitlines()[-steps:]]
            parameters = sum(p.numel() for p in made.model.parameters())
            found[how] = {
                "bytes_s": round(statistics.median(line["tok_s"] for line in lines)),
                "fill": round(statistics.mean(line["fill"] for line in lines), 3),
                "ran": made._how()["mode"],
            }
    times = round(found["packed"]["bytes_s"] / found["padded"]["bytes_s"], 3)
    return {"parameters": parameters, "backend": made.model.model.layers[0].mixer.backend(), **found, "times": times}


def rows(setting: Setting) -> Iterator[Row]:
    setting = dataclasses.replace(setting, folder=setting.folder / "documents")
    batch, length, width, depth = (2, 64, 16, 1) if setting.tiny else (8, 4096, 512, 4)
    write_documents(setting, length // 16, length, 400 if setting.tiny else 20_000)
    for variant in ("e42", "lstm") if setting.tiny else list_variants():
        if setting.wants(variant=variant):
            yield setting.row(
                lambda v=variant: measured(setting, f"{v}@{width}x{depth}", batch, length),  # type: ignore[misc]
                who=variant, kind="ours", D=width, L=depth, B=batch, T=length,
            )  # fmt: skip
