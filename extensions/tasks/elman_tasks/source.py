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

AHEAD = 2**18
"""Places that are drawn at a time, of as many steps: the calls for a few would take longer than their numbers."""


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
        self._block: tuple[int, NDArray[np.int64], Drawn] | None = None

    def read(self, step: int, rows: NDArray[np.int64]) -> Batch:
        steps = max(1, AHEAD // (self.length * len(rows)))
        number, first = step // steps, step % steps * len(rows)
        if self._block is None or self._block[0] != number or not np.array_equal(self._block[1], rows):
            self._block = number, rows.copy(), self.task.batch(self.seed, number * steps, rows, self.rows, steps)
        return self._batch(self._block[2], rows, slice(first, first + len(rows)))

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

    def _batch(self, drawn: Drawn, rows: NDArray[np.int64], part: slice = slice(None)) -> Batch:
        dtype = np.min_scalar_type(self.vocab_size - 1)
        counts = np.ascontiguousarray((drawn.scored if drawn.trained is None else drawn.trained)[part])
        fresh = np.ones(len(rows), dtype=bool)
        return Batch(drawn.tokens[part].astype(dtype), rows, fresh, drawn.targets[part].astype(dtype), counts)

    @property
    def in_words(self) -> str:
        return f"{self.name}: {self.task.definition.rstrip('.')}"
