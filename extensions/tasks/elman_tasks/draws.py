"""Random numbers of rows: a pure function of a seed, the number of the step and of the row, as everywhere in the core."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from elman_core.extension import hash_u64

BLOCK = 2**15
"""Numbers that are drawn at a time: they stay in a cache, where new memory for all would take longer than the arithmetic."""


class Draws:
    """The random numbers of some rows. Each call takes new ones; the same calls give the same numbers.

    Args:
        seed, counters: as for `elman_core.data.hash_u64`; their broadcast has one element a row.
    """

    def __init__(self, seed: int, *counters: ArrayLike) -> None:
        self.key_R, self.calls = hash_u64(seed, *counters), 0
        self.rows = len(self.key_R)

    def words(self, *shape: int) -> NDArray[np.uint64]:
        """64 random bits each: (R, *shape), uint64."""
        self.calls += 1
        made = hash_u64(self.calls, self.key_R[:, None], np.arange(math.prod(shape)))
        return made.reshape(self.rows, *shape)

    def unit(self, *shape: int) -> NDArray[np.float64]:
        """Numbers in [0, 1): (R, *shape)."""
        return unit(self.words(*shape))

    def by_place(self, places: int) -> Iterator[tuple[slice, NDArray[np.uint64]]]:
        """The numbers of `words(places)`, some places at a time: which, and (t, R)."""
        self.calls += 1
        step = max(1, BLOCK // self.rows)
        for first in range(0, places, step):
            some = slice(first, min(first + step, places))
            yield some, hash_u64(self.calls, self.key_R, np.arange(some.start, some.stop)[:, None])

    def below(self, limit: int, *shape: int) -> NDArray[np.int64]:
        """Integers in [0, limit): (R, *shape), int64. Raises `ValueError` if there are none."""
        if limit < 1:
            raise ValueError(f"there is no number from 0 to below {limit}")
        return (self.words(*shape) % np.uint64(limit)).astype(np.int64)

    def distinct(self, limit: int, count: int, odds: NDArray[Any] | None = None) -> NDArray[np.int64]:
        """`count` different integers in [0, limit) in random order: (R, count). With `odds`, one after the other by weight."""
        if odds is None and count < limit:  # the top of a deck, shuffled
            deck_N, row_R = np.arange(limit, dtype=np.min_scalar_type(limit)), np.arange(self.rows)
            deck_RN = np.tile(deck_N, (self.rows, 1))
            swap_RC = np.arange(count) + (
                self.words(count) % np.arange(limit, limit - count, -1, dtype=np.uint64)
            ).astype(np.int64)
            for i, j_R in enumerate(swap_RC.T):
                deck_RN[row_R, j_R], deck_RN[:, i] = deck_RN[:, i], deck_RN[row_R, j_R]
            return deck_RN[:, :count].astype(np.int64)
        race = -np.log1p(-self.unit(limit)) / (1.0 if odds is None else odds)  # the first of exponential clocks
        first = np.argpartition(race, count - 1, 1)[:, :count] if count < limit else np.argsort(race, 1)
        return np.take_along_axis(first, np.argsort(np.take_along_axis(race, first, 1), 1), 1)


def unit(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """The number in [0, 1) of each word."""
    # Signed integers convert ten times as fast.
    return (words >> np.uint64(11)).view(np.int64).astype(np.float64) * 2.0**-53
