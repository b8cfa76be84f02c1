"""A file as bytes: opened with one mmap, whatever its size, and never preprocessed."""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from elman_core.registry.errors import DataError

from .counter import uniform

SEPARATOR = 0x1E
"""ASCII record separator: ends a document."""

FINGERPRINT_BLOCK = 4096
FINGERPRINT_BLOCKS = 64


class ByteFile:
    """A read-only view of a file's bytes. Opening costs the same for a kilobyte and for a terabyte.

    Args:
        path: a regular file.

    Raises:
        DataError: missing, not a regular file, unreadable or empty.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).expanduser()
        try:
            info = os.stat(self.path)
            if not stat.S_ISREG(info.st_mode):
                raise DataError(f"{self.path} is not a regular file; training data is one file of raw bytes")
            if info.st_size == 0:
                raise DataError(f"{self.path} is empty; training data is one file of raw bytes")
            self.bytes_N: NDArray[np.uint8] = np.frombuffer(_map(self.path), dtype=np.uint8)
        except FileNotFoundError:
            raise DataError(f"there is no file {self.path}; give the training text with --data FILE") from None
        except OSError as error:
            raise DataError(f"cannot read {self.path}: {error.strerror or error}") from error

    @property
    def size(self) -> int:
        return int(self.bytes_N.shape[0])

    def windows(self, offsets_R: NDArray[np.int64], length: int) -> NDArray[np.uint8]:
        """The `length` bytes at each offset, copied: (R, length), uint8."""
        return np.stack([self.bytes_N[o : o + length] for o in offsets_R])

    def fingerprint(self) -> dict[str, int | str]:
        """Size and a BLAKE2 hash of 64 blocks of 4 KiB: the first, the last, and others at hashed places."""
        last = max(0, self.size - FINGERPRINT_BLOCK)
        places = {0, last, *uniform(0, range(FINGERPRINT_BLOCKS - 2), below=last + 1).tolist()}
        digest = hashlib.blake2b(str(self.size).encode(), digest_size=16)
        for place in sorted(places):
            digest.update(self.bytes_N[place : place + FINGERPRINT_BLOCK].tobytes())
        return {"size": self.size, "blake2b": digest.hexdigest()}


def _map(path: Path) -> mmap.mmap:
    with path.open("rb") as opened:
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_RANDOM"):  # without it each window costs a read-ahead of many pages
        mapped.madvise(mmap.MADV_RANDOM)
    return mapped
