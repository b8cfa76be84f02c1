"""The windows of a file that each batch has, and those that an evaluation scores.

A window is `length + 1` tokens: the first `length` are inputs, the last `length` are targets. A token of a raw file is a byte.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from elman_core.registry.errors import ConfigError, DataError

from .bytes import ByteFile
from .counter import uniform
from .packed import PackedFile
from .source import Batch, Heldout, Source
from .split import Runs, Split

SAMPLINGS = ("random", "stream", "tbptt")


class _Numbered:
    """Places in the stretches of a text, numbered through in file order. `counts`: of each stretch."""

    def __init__(self, runs: Runs, counts: NDArray[np.int64], length: int) -> None:
        self.firsts, self.ends = runs[counts > 0, 0], np.cumsum(counts[counts > 0])
        if len(self.ends) == 0:
            longest = int((runs[:, 1] - runs[:, 0]).max()) if len(runs) else 0
            raise DataError(
                f"the text is too short: a window is {length + 1} bytes and the longest stretch of training text is {longest}; "
                f"use a longer file, or smaller chunks (train.chunk_size)"
            )

    def find(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The first byte of the stretch of each place, and its number there."""
        run = np.searchsorted(self.ends, numbers, side="right")
        return self.firsts[run], numbers - np.where(run > 0, self.ends[run - 1], 0)


class RandomSampler:
    """Every window starts at a random byte; each start is equally likely, and held-out bytes are never touched."""

    def __init__(self, runs: Runs, length: int, seed: int) -> None:
        self.starts = _Numbered(runs, runs[:, 1] - runs[:, 0] - length, length)
        self.seed = seed

    def place(self, step: int, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Offsets (R,) and freshness (R,) of these rows of global batch `step` (from 0); a rank asks for its own."""
        first, start = self.starts.find(uniform(self.seed, step, rows, below=int(self.starts.ends[-1])))
        return first + start, np.ones(len(rows), dtype=bool)


class StreamSampler:
    """Each row reads its own part of the file in order, with one byte of overlap between windows.

    The windows of all stretches are numbered in file order and dealt to the rows in equal, contiguous parts; a row that has
    come to the end of its part starts it again. The order does not depend on the seed.
    """

    def __init__(self, runs: Runs, length: int, rows: int) -> None:
        self.windows = _Numbered(runs, (runs[:, 1] - runs[:, 0] - 1) // length, length)
        self.length = length
        count = int(self.windows.ends[-1])
        self.windows_per_row = count // rows
        if self.windows_per_row == 0:
            raise DataError(
                f"the training text holds {count} windows of {length + 1} bytes, fewer than the {rows} rows of a "
                f"batch: use a longer file, or lower train.batch_size or train.chunk_size"
            )

    def place(self, step: int, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        turn = step % self.windows_per_row
        first, window = self.windows.find(rows * self.windows_per_row + turn)
        return first + window * self.length, (window == 0) | (turn == 0)


class FileSource(Source):
    """Rows of the training text of a file. `parts`: its split."""

    def __init__(self, file: ByteFile | PackedFile, parts: Split, length: int, rows: int, seed: int) -> None:
        super().__init__(length, rows, seed)
        self.file, self.parts = file, parts
        self.name = str(file.path)
        self.vocab_size, self.separator, self.tokenizer = file.vocab_size, file.separator, file.tokenizer
        self.bytes_per_token, self.chat_template = file.bytes_per_token, file.chat_template

    @property
    def in_words(self) -> str:
        return f"{self.file.size:,} {self.file.unit}, {self.parts.in_words}"


class TrainingWindows(FileSource):
    """The training windows of a file: `batch(step)` gives the same tokens whenever and wherever it is asked.

    Args:
        file: the tokens. parts: its split; only training tokens are read.
        length: inputs in a window (train.chunk_size). rows: rows of the global batch (train.batch_size).
        sampling: `random` offsets; `stream`: contiguous; `tbptt`: contiguous, and the model's state is carried.

    Raises:
        DataError: no stretch of training text holds a window, or too few for the rows. ConfigError: unknown sampling.
    """

    def __init__(
        self, file: ByteFile | PackedFile, parts: Split, length: int, rows: int, seed: int, sampling: str = "random"
    ) -> None:
        super().__init__(file, parts, length, rows, seed)
        if sampling not in SAMPLINGS:
            raise ConfigError(f"data.sampling must be one of {', '.join(SAMPLINGS)}, not {sampling!r}")
        self.sampler: RandomSampler | StreamSampler = (
            RandomSampler(parts.training_runs, length, seed)
            if sampling == "random"
            else StreamSampler(parts.training_runs, length, rows)
        )

    def read(self, step: int, rows: NDArray[np.int64]) -> Batch:
        return windows_at(self.file, *self.sampler.place(step, rows), self.length)

    def origin(self, step: int) -> dict[str, list[int]]:
        return {"offsets": self.sampler.place(step, np.arange(self.rows))[0].tolist()}


def windows_at(file: ByteFile | PackedFile, offsets: NDArray[np.int64], fresh: NDArray[np.bool_], length: int) -> Batch:
    """The windows of a file that start at `offsets`."""
    return Batch(file.windows(offsets, length + 1), offsets, fresh, counts=file.counts(offsets + 1, length))


def heldout_windows(file: ByteFile | PackedFile, parts: Split, length: int, most: int | None = None) -> Heldout:
    """The evaluation windows of a file, at the places of `heldout_offsets`, which also says what is raised."""
    offsets, length = heldout_offsets(parts, length, most)
    return Heldout(len(offsets), length, lambda n: windows_at(file, offsets[n], np.ones(len(n), bool), length))


def heldout_offsets(parts: Split, length: int, most_bytes: int | None = None) -> tuple[NDArray[np.int64], int]:
    """Return the offsets of the evaluation windows, (N,), int64, and the bytes each scores: equal for all runs on this file.

    Held-out stretches are cut into windows of `length` scored bytes (fewer if a held-out block is shorter) with one byte of
    overlap. If they score more than `most_bytes`, evenly spaced ones are kept.

    Raises:
        DataError: nothing is held out.
    """
    if len(parts.heldout_runs) == 0 or parts.block < 2:
        raise DataError("nothing is held out: data.heldout is 0, or the text is too short; elman eval --all scores it")
    length = min(length, parts.block - 1)
    each = (parts.heldout_runs[:, 1] - parts.heldout_runs[:, 0] - 1) // length
    offsets = np.concatenate([run[0] + np.arange(n) * length for run, n in zip(parts.heldout_runs, each, strict=True)])
    if most_bytes is not None and len(offsets) * length > most_bytes:
        kept = max(1, most_bytes // length)
        offsets = offsets[np.arange(kept) * len(offsets) // kept]
    return offsets, length
