"""Rows filled with whole documents (`data.documents = "pack"`).

A row is a list of pieces: documents, and parts of those that are longer than a row. A piece of n steps has n inputs and the n
tokens after them as targets, so no target lies across a boundary. Before a document's first token, the input is the separator.

The training pieces in the random order of epoch 0, then of epoch 1 and so on are one endless sequence. It is cut into blocks of
about equally many tokens, and the pieces of a block fill `BLOCK` rows. So the pieces of any row follow from its number alone.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elman_core.registry.errors import DataError

from .bytes import ByteFile
from .counter import hash_u64, uniform
from .packed import PackedFile
from .sampling import FileSource
from .source import Batch, Rows
from .split import Runs, Split

BLOCK = 128
"""Rows that are filled together, in about a millisecond."""

Parts = list[tuple[int, int, int]]
"""Of a row: the number of each piece, how many steps of it stand elsewhere before these, and how many these are."""


class PackedRows(FileSource):
    """Training rows of whole documents: every piece once an epoch, in an order that the seed decides. Raw bytes are read once,
    for their separators. Raises `DataError` if the training text fills no row."""

    def __init__(self, file: ByteFile | PackedFile, parts: Split, length: int, rows: int, seed: int) -> None:
        super().__init__(file, parts, length, rows, seed)
        self.firsts, self.counts, self.begins = pieces(file.ends(), parts.training_runs, length, self.separator)
        self.total = int(self.counts.sum())
        if self.total < length:
            raise DataError(
                f"the text is too short: {self.total} bytes to train on fill no row of {length}; use a longer file, or smaller "
                "chunks (train.chunk_size)"
            )
        # As many tokens as BLOCK rows hold of whole pieces, in each of some samples: then hardly any has to be cut.
        self.block = max(BLOCK, (BLOCK - 1) * length)
        while any(self._cuts(self._sample(number)) for number in range(8)):
            self.block = int(0.99 * self.block)
        self.order, self.filled = lru_cache(2)(self._order), lru_cache(2)(self._filled)

    def read(self, step: int, rows: Rows) -> Batch:
        numbers = step * self.rows + rows
        chosen = [self.filled(number // BLOCK)[number % BLOCK] for number in numbers.tolist()]
        piece, done, steps = np.array([part for parts in chosen for part in parts]).T
        filled = np.array([sum(here for _, _, here in parts) for parts in chosen], np.int32)
        inside = np.arange(self.length) < filled[:, None]
        # Each piece is read with the token before its first target, unless the text begins with that.
        firsts = self.firsts[piece] + done
        before = np.minimum(firsts, 1)
        text = self.file.windows(firsts - before, steps + before)
        places = np.arange(steps.sum()) + np.repeat(np.cumsum(before), steps)  # of the targets in the text
        heads = np.cumsum(steps) - steps  # of the pieces among the targets
        inputs = text[places - 1]
        inputs[heads[self.begins[piece] & (done == 0)]] = self.separator or 0  # without one no piece is so
        starts = np.zeros(len(places), bool)
        starts[heads] = True
        mask = self.file.counts(firsts, steps)
        offsets = self.firsts[[parts[0][0] for parts in chosen]]

        def in_rows(values: NDArray[Any]) -> NDArray[Any]:
            """One piece behind the other, row after row; 0 where a row is not filled."""
            whole = np.zeros(inside.shape, values.dtype)
            whole[inside] = values
            return whole

        counts = inside if mask is None else in_rows(mask)
        fresh = np.ones(len(rows), bool)
        return Batch(in_rows(inputs), offsets, fresh, in_rows(text[places]), counts, in_rows(starts), filled)

    def _order(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The pieces in the order of an epoch, and the tokens up to the end of each."""
        order = np.argsort(hash_u64(self.seed, epoch, np.arange(len(self.firsts))), kind="stable")
        return order, np.cumsum(self.counts[order])

    def _filled(self, block: int) -> list[Parts]:
        """The rows of a block, in random order. Its pieces are those that end within its tokens of the endless sequence."""
        first, last = block * self.block, (block + 1) * self.block
        chosen = []
        for epoch in range(first // self.total, (last - 1) // self.total + 1):
            order, ends = self.order(epoch)
            among = np.searchsorted(ends + epoch * self.total, [first, last], side="right")
            chosen.append(order[slice(*among)])
        which = np.concatenate(chosen)
        rows = fill(zip(which.tolist(), self.counts[which].tolist(), strict=True), self.length)
        return [rows[r] for r in np.argsort(hash_u64(self.seed, block, np.arange(BLOCK), 1), kind="stable")]

    def _cuts(self, steps: list[int]) -> bool:
        """Whether pieces of these steps fill a block of rows only if some are cut."""
        filled = fill(enumerate(steps), self.length)
        return sum(map(len, filled)) > max(len(steps), BLOCK)

    def _sample(self, number: int) -> list[int]:
        """The steps of pieces drawn at random, a block of them."""
        ample = BLOCK + 2 * self.block * len(self.counts) // self.total
        drawn = uniform(0, number, np.arange(ample), below=len(self.counts))
        steps = self.counts[drawn]
        return steps[np.cumsum(steps) < self.block + self.length].tolist()

    @property
    def in_words(self) -> str:
        return f"{super().in_words}; {len(self.firsts):,} documents and parts of long ones"


def pieces(
    ends: NDArray[np.int64], runs: Runs, length: int, separator: int | None
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.bool_]]:
    """The documents of some stretches, cut at their edges and into parts of at most `length` steps.

    Returns for each piece the place of its first target, its steps, and whether the separator is the input before it.
    """
    edges = np.unique(np.concatenate([[0], ends, runs.ravel()]))
    first, last = edges[:-1], edges[1:]
    run = np.searchsorted(runs[:, 0], first, side="right") - 1
    inside = (run >= 0) & (last <= runs[run, 1])
    first, last = first[inside], last[inside]
    begins = np.isin(first, np.append(0, ends)) if separator is not None else np.zeros(len(first), bool)
    first = first + ~begins  # nothing that training may read predicts the first token of the others
    parts = -(-(last - first) // length)
    within = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
    firsts = np.repeat(first, parts) + length * within
    steps = np.minimum(length, np.repeat(last, parts) - firsts).astype(np.int32)
    return firsts, steps, np.repeat(begins, parts) & (within == 0)


def fill(pieces: Iterable[tuple[int, int]], length: int, rows: int = BLOCK) -> list[Parts]:
    """Put pieces (number, steps), none longer than a row, into rows: the longest first, each where least room stays.

    A piece that fits nowhere is cut, and the longest ones if there are fewer than rows, so that no row stays empty. There must
    be room for all together.
    """
    order = sorted(((steps, piece, 0) for piece, steps in pieces), reverse=True)
    while len(order) < rows and order[0][0] > 1:
        steps, piece, done = order[0]
        half = steps // 2
        halves = [(half, piece, done), (steps - half, piece, done + half)]
        order = sorted([*order[1:], *halves], reverse=True)
    filled: list[Parts] = [[] for _ in range(rows)]
    room = [(length, row) for row in range(rows)]  # what is left of each row, rising, and its number
    for place, (steps, piece, done) in enumerate(order):
        while steps:
            tightest = bisect_left(room, (steps, 0)) if place >= rows else rows
            space, row = room.pop(min(tightest, rows - 1))
            here = min(space, steps)
            filled[row].append((piece, done, here))
            insort(room, (space - here, row))
            done += here
            steps -= here
    return filled
