"""Tasks as a source of batches: `--data task:NAME`."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elman_core.extension import Batch, ConfigError, Heldout, Source

from .catalogue import Drawn, find

HELD_OUT = 1024
"""Most sequences of an evaluation."""


class TaskSource(Source):
    """The training sequences of a task; its vocabulary is the model's.

    Args:
        options: the task, as `find` takes it. length: of its longest training sequence.

    Raises:
        ConfigError: there is no such task, or `length` is another.
    """

    def __init__(self, options: str, length: int, rows: int, seed: int) -> None:
        super().__init__(length, rows, seed)
        self.task, self.name = find(options), f"task {options}"
        if length != self.task.longest:
            raise ConfigError(
                f"{self.name} has sequences of {self.task.longest} inputs: --set train.chunk_size={self.task.longest}"
            )
        self.vocab_size = self.task.vocabulary

    def read(self, step: int, rows: NDArray[np.int64]) -> Batch:
        return self._batch(self.task.batch(self.seed, step, rows, self.rows), rows)

    def fingerprint(self) -> dict[str, Any]:
        """`blake2b` of the first sequences with seed 0; the lengths of tests do not matter."""
        batch = self._batch(self.task.batch(0, 0, range(64), 64), np.arange(64))
        digest = hashlib.blake2b(self.task.name.partition(":")[0].encode(), digest_size=16)
        for array in (batch.tokens, batch.targets, batch.counts):
            assert array is not None
            digest.update(array.tobytes())
        return {"size": 0, "blake2b": digest.hexdigest()}

    def heldout(self, most: int) -> Heldout:
        return Heldout(
            max(1, min(HELD_OUT, most // self.length)),
            self.length,
            lambda numbers: self._batch(self.task.heldout(numbers), numbers),
        )

    def _batch(self, drawn: Drawn, rows: NDArray[np.int64]) -> Batch:
        dtype = np.uint8 if self.vocab_size <= 256 else np.uint16
        counts = drawn.scored if drawn.trained is None else drawn.trained
        fresh = np.ones(len(rows), dtype=bool)
        return Batch(drawn.tokens.astype(dtype), rows, fresh, drawn.targets.astype(dtype), np.ascontiguousarray(counts))

    @property
    def in_words(self) -> str:
        return f"{self.name}: {self.task.definition}"
