"""The bytes held out from training: whole blocks, chosen by the hash of the block's number."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elman_core.registry.errors import DataError

from .counter import U64, hash_u64

BLOCK = 64 * 1024
SMALLEST_BLOCK = 64
LEAST_HELDOUT = 1024 * 1024
_SEED = 0x656C6D616E  # fixed: a file is split in the same way for every run
_CHUNK = 1 << 15  # block numbers hashed at a time: stays in the processor's cache

Runs = NDArray[np.int64]
"""(n, 2): first byte and end of each stretch, in order."""


@dataclass(frozen=True)
class Split:
    """The two parts of a file of `size` bytes.

    Attributes:
        size: bytes in the file.
        fraction: as requested.
        block: bytes in a block: 64 KiB, or less for files under a megabyte.
        heldout_runs, training_runs: stretches of whole blocks, (n, 2), int64.
    """

    size: int
    fraction: float
    block: int
    heldout_runs: Runs
    training_runs: Runs

    @property
    def heldout_bytes(self) -> int:
        return int((self.heldout_runs[:, 1] - self.heldout_runs[:, 0]).sum())

    @property
    def training_bytes(self) -> int:
        return self.size - self.heldout_bytes

    @property
    def in_words(self) -> str:
        """The number of held-out bytes, with its true share of the file: `1,048,576 (10.4 %) held out, the least for …`."""
        if not self.heldout_bytes:
            return "nothing held out"
        asked = self.fraction * self.size >= self.heldout_bytes - self.block
        least = "" if asked else ", the least for a text of this size"
        return f"{self.heldout_bytes:,} ({self.heldout_bytes / self.size:.1%}) held out{least}".replace("%", " %")


def split(size: int, fraction: float = 0.01) -> Split:
    """Hold out `fraction` of a file, but at least min(1 MiB, 10 %), in blocks of 64 KiB.

    The n blocks whose numbers have the smallest hashes are held out, so the choice depends only on the size and the
    fraction. Files too small for sixteen such blocks are divided into smaller ones (a power of two). An incomplete last block
    is always used for training. With `fraction` 0 nothing is held out.

    Raises:
        DataError: fraction outside [0, 0.5].
    """
    if not 0 <= fraction <= 0.5:
        raise DataError(f"data.heldout must be between 0 and 0.5, not {fraction}")
    block = BLOCK if size >= 16 * BLOCK else max(SMALLEST_BLOCK, 1 << max(0, (size // 16).bit_length() - 1))
    blocks = size // block
    wanted = max(fraction * size, min(LEAST_HELDOUT, 0.1 * size)) if fraction else 0.0
    chosen = _smallest(blocks, min(blocks, math.ceil(wanted / block)))
    heldout = _join(chosen, block)
    edges = np.concatenate([[0], heldout.ravel(), [size]]).reshape(-1, 2)
    return Split(size, fraction, block, heldout, edges[edges[:, 1] > edges[:, 0]])


def all_held_out(size: int) -> Split:
    """The split of a file that is only evaluated on."""
    return Split(size, 1.0, size, np.array([[0, size]]), np.zeros((0, 2), dtype=np.int64))


def _smallest(blocks: int, count: int) -> NDArray[np.int64]:
    """The `count` of `blocks` block numbers whose hashes are smallest, ascending."""
    if count == 0:
        return np.zeros(0, dtype=np.int64)
    # Only hashes below a bound that leaves ample candidates are kept, so memory does not grow with the file.
    share = count / blocks + 8 * math.sqrt(count) / blocks
    bound = np.uint64(min(2**64 - 1, int(share * 2**64)))
    numbers, hashes = _candidates(blocks, bound)
    if len(numbers) < count:
        numbers, hashes = _candidates(blocks, np.uint64(2**64 - 1))
    return np.sort(numbers[np.argsort(hashes, kind="stable")[:count]])


def _candidates(blocks: int, bound: np.uint64) -> tuple[NDArray[np.int64], U64]:
    numbers, hashes = [], []
    for first in range(0, blocks, _CHUNK):
        hashed = hash_u64(_SEED, np.arange(first, min(first + _CHUNK, blocks), dtype=np.uint64))
        below = np.flatnonzero(hashed <= bound)
        numbers.append(below + first)
        hashes.append(hashed[below])
    return np.concatenate(numbers), np.concatenate(hashes)


def _join(blocks: NDArray[np.int64], block: int) -> Runs:
    """Neighbouring blocks as runs of bytes."""
    if len(blocks) == 0:
        return np.zeros((0, 2), dtype=np.int64)
    breaks = np.flatnonzero(np.diff(blocks) != 1)
    first, last = blocks[np.append(0, breaks + 1)], blocks[np.append(breaks, -1)]
    return np.stack([first, last + 1], axis=1) * block
