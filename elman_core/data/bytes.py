"""A file as bytes: memory-mapped, so a file of any size opens at once, and never preprocessed.

Reading a mapped file that was truncated, or is on a failing network disk, kills a process with SIGBUS and no message. So the
pages of a window are requested first, for which the kernel returns an error instead (`MADV_POPULATE_READ`, Linux 5.14). Without
that call, and after such an error, the window is read with `pread`, whose error says what failed and where.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import mmap
import os
import stat
import sys
import time
import weakref
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from elman_core.registry.errors import DataError, LoaderError

from .counter import uniform

log = logging.getLogger("elman_core")

SEPARATOR = 0x1E
"""ASCII record separator: ends a document."""

FINGERPRINT_BLOCK = 4096
FINGERPRINT_BLOCKS = 64
DIGESTED_WHOLE = 1 << 24
"""Texts of at most so many bytes are hashed whole where a run begins and resumes: in 0.05 s."""
WAITS = (1.0, 5.0, 25.0)
"""Seconds before each retry of a read whose error is often temporary on a network disk."""

PACKED_MAGIC = b"ELMAN PACKED "
"""The first bytes of a file that `elman data pack` has written."""

NO_TEXT = {
    "gzip": b"\x1f\x8b\x08", "zstd": b"\x28\xb5\x2f\xfd", "xz": b"\xfd7zXZ\x00", "bzip2": b"BZh", "zip": b"PK\x03\x04",
    "lz4": b"\x04\x22\x4d\x18", "7z": b"7z\xbc\xaf\x27\x1c", "Parquet": b"PAR1", "Arrow": b"ARROW1", "Avro": b"Obj\x01",
    "HDF5": b"\x89HDF\r\n", "NumPy": b"\x93NUMPY", "SQLite": b"SQLite format 3\0", "PDF": b"%PDF-",
    "Arrow stream": b"\xff\xff\xff\xff", "PNG": b"\x89PNG", "JPEG": b"\xff\xd8\xff", "GIF": b"GIF8", "RIFF": b"RIFF",
    "TIFF": b"II*\0",
}  # fmt: skip
"""The first bytes of files that hold text in another form, or none."""
_POPULATE_READ = getattr(mmap, "MADV_POPULATE_READ", 22 if sys.platform == "linux" else None)
_PASSING = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.ENETDOWN, errno.EHOSTDOWN)


class ByteFile:
    """A read-only view of a file's bytes. Opening costs the same for a kilobyte and for a terabyte.

    Args:
        path: a regular file. Its size is what it is now: bytes that are appended later do not count.
        packed: accept a packed file, too, as its bytes.

    Attributes:
        size: bytes. packed: whether it is a packed file, which `PackedFile` reads.

    Raises:
        DataError: missing, not a regular file, unreadable, empty, or no text, as gzip, Parquet, images and others are.
    """

    dtype = np.dtype(np.uint8)
    unit = "bytes"
    vocab_size = 256
    separator = SEPARATOR
    bytes_per_token = 1.0
    tokenizer = chat_template = None

    def __init__(self, path: str | os.PathLike[str], packed: bool = False) -> None:
        self.path = Path(path).expanduser()
        try:
            info = os.stat(self.path)
            if not stat.S_ISREG(info.st_mode):
                raise DataError(f"{self.path} is not a regular file: give a text (elman data pack joins a folder)")
            if info.st_size == 0:
                raise DataError(f"{self.path} is empty: give a text, or a file that elman data pack wrote")
            self._open()
        except FileNotFoundError:
            hint = "each text has its own --data FILE:NUMBER" if {*",: "} & {*str(path)} else "correct the path"
            raise DataError(f"there is no file {self.path}: {hint}") from None
        except OSError as error:
            raise DataError(f"cannot read {self.path}: {error.strerror or error}") from error
        self.size = os.fstat(self._descriptor).st_size
        start = os.pread(self._descriptor, 16, 0)
        self.packed = start.startswith(PACKED_MAGIC)
        kind = next((name for name, magic in NO_TEXT.items() if start.startswith(magic)), None)
        if self.packed and not packed:
            kind = "elman data pack"
        if kind is not None:
            raise DataError(f"{self.path} is no raw text ({kind}): elman data pack makes training data of it")
        if self.path.suffix in (".jsonl", ".ndjson"):
            _warn_of_json(self.path)
        self._known: dict[str, int | str] | None = None  # the fingerprint
        self._changed = self._stamp()

    def read(self, offset: int, length: int) -> NDArray[np.uint8]:
        """The bytes from `offset` on: (length,), uint8; fewer at the end of the file.

        Raises:
            LoaderError: the disk failed, after four attempts within half a minute where that may help.
            DataError: the file has been cut short since it was opened.
        """
        wanted = max(0, min(length, self.size - offset))
        got = self._mapped([(offset, wanted)]) if wanted else b""
        if got is None:
            got = self._patiently(offset, wanted)
        if len(got) < wanted:
            raise DataError(
                f"{self.path} was truncated while it was read: no data at byte {offset + len(got):,}, where it had "
                f"{self.size:,} bytes when it was opened"
            )
        return np.frombuffer(got, dtype=np.uint8)

    def windows(self, offsets_R: NDArray[np.int64], lengths_R: int | NDArray[np.int64]) -> NDArray[np.uint8]:
        """The bytes at each offset, uint8: (R, length), or of windows of their own lengths one behind the other. Raises as
        `read`; `DataError` if the text has changed."""
        self.check_unchanged()
        wanted = list(zip(offsets_R.tolist(), np.broadcast_to(lengths_R, offsets_R.shape).tolist(), strict=True))
        got = self._mapped(wanted)
        parts = [self.read(*one) for one in wanted] if got is None else [np.frombuffer(got, np.uint8)]
        found = np.concatenate(parts)  # a copy, which may be written to
        return found.reshape(len(wanted), -1) if np.ndim(lengths_R) == 0 else found

    def counts(self, _offsets_R: NDArray[np.int64], _lengths_R: int | NDArray[np.int64]) -> None:
        """The loss mask of windows of targets: every byte counts."""

    def ends(self) -> NDArray[np.int64]:
        """Where each document ends, as `PackedFile.ends`. Reads the whole file."""
        step = 1 << 24
        found = [np.flatnonzero(self.read(at, step) == SEPARATOR) + at + 1 for at in range(0, self.size, step)]
        ends = np.concatenate(found)
        return ends if len(ends) and ends[-1] == self.size else np.append(ends, self.size)

    def fingerprint(self) -> dict[str, int | str]:
        """Size and a BLAKE2 hash of 64 blocks of 4 KiB: the first, the last, and others at hashed places."""
        last = max(0, self.size - FINGERPRINT_BLOCK)
        places = {0, last, *uniform(0, range(FINGERPRINT_BLOCKS - 2), below=last + 1).tolist()}
        digest = hashlib.blake2b(str(self.size).encode(), digest_size=16)
        for place in sorted(places):
            digest.update(self.read(place, FINGERPRINT_BLOCK).tobytes())
        facts: dict[str, int | str] = {"size": self.size, "blake2b": digest.hexdigest()}
        self._known = self._known or facts
        return dict(facts)

    def digest(self) -> str | None:
        """A BLAKE2 hash of all bytes; None for a file of more than 16 MiB."""
        if self.size > DIGESTED_WHOLE:
            return None
        return hashlib.blake2b(self.read(0, self.size).tobytes(), digest_size=16).hexdigest()

    def check_unchanged(self) -> None:
        """Compare the file's size and time with those at the last look, and its fingerprint if they differ.
        Raises `DataError` if the bytes have changed since `fingerprint` was first called."""
        stamp = self._stamp()
        if stamp == self._changed or self._known is None:
            return
        if stamp[0] >= self.size and self.fingerprint() != self._known:
            raise DataError(f"{self.path} was changed while it was read: it is no longer the text of this training")
        self._changed = stamp  # touched, appended to, or cut short, which `read` reports

    def _stamp(self) -> tuple[int, int]:
        try:
            info = os.fstat(self._descriptor)
        except OSError:  # a stale handle of a network disk: reading opens the file again
            return self._changed
        return info.st_size, info.st_mtime_ns

    def _open(self) -> None:
        self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        self._finalizer = weakref.finalize(self, os.close, self._descriptor)
        self._map = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)
        # Without these each window costs a read-ahead of many pages.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        if hasattr(mmap, "MADV_RANDOM"):
            self._map.madvise(mmap.MADV_RANDOM)

    def _mapped(self, windows: Sequence[tuple[int, int]]) -> bytes | None:
        """The bytes from the mapping; None if their pages are unavailable, or the file now ends before them."""
        if _POPULATE_READ is None:
            return None
        parts: list[bytes] = []
        try:
            for offset, length in windows:
                start = offset - offset % mmap.PAGESIZE
                self._map.madvise(_POPULATE_READ, start, offset + length - start)
                parts.append(self._map[offset : offset + length])
            # Bytes after a new end read as zeros in its last page.
            return b"".join(parts) if os.fstat(self._descriptor).st_size >= max(map(sum, windows)) else None
        except OSError:
            return None

    def _patiently(self, offset: int, length: int) -> bytes:
        stale = False
        for wait in (*WAITS, None):
            try:
                if stale:
                    self._finalizer()
                    self._open()
                return self._read_at(offset, length)
            except OSError as error:
                said = f"cannot read {self.path} at byte {offset:,}: {error.strerror or error}"
                if wait is None or error.errno not in _PASSING:
                    raise LoaderError(said) from error
                log.warning("elman: %s; trying again in %g s", said, wait)
                time.sleep(wait)
                stale = stale or error.errno == errno.ESTALE
        raise AssertionError("the last attempt returns or raises")

    def _read_at(self, offset: int, length: int) -> bytes:
        parts: list[bytes] = []
        while length:
            part = os.pread(self._descriptor, length, offset)
            if not part:
                break
            parts.append(part)
            offset += len(part)
            length -= len(part)
        return b"".join(parts)


@cache
def _warn_of_json(path: Path) -> None:
    log.warning("elman: %s holds JSON, which a model will learn as it stands; elman data pack takes its texts", path)
