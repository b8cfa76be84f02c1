"""Packed files, as `elman data pack` writes them: tokens of one width, where documents end, and which targets count.

    FILE        64 bytes that begin with MAGIC · tokens · ends of documents (int64) · loss mask, if any (a bit a token)
    FILE.json   the manifest: what the sections are, made of which files, with which tokenizer

Every section begins at a multiple of 8 bytes; numbers are little-endian; bit i of byte j of the mask is of token 8 j + i. A
mask is one of targets: where its bit is 0, predicting that token does not count.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elman_core.registry.errors import CheckpointError, DataError
from elman_core.registry.variant import is_of
from elman_core.storage import read_json

from .bytes import PACKED_MAGIC, ByteFile

PACKED_FORMAT = "elman packed 1"
PACKED_HEADER = (PACKED_MAGIC + b"1\n").ljust(64, b"\0")
DTYPES = ("uint8", "uint16", "uint32")
_NEEDED: dict[str, Any] = {
    "format": str, "dtype": str, "tokens": int, "documents": int, "bytes": int, "vocab_size": int, "masked": bool, "size": int,
    "blake2b": str, "tokenizer": dict | None, "separator": int | None, "chat_template": str | None,
}  # fmt: skip


class PackedFile:
    """A read-only view of a packed file, memory-mapped.

    Attributes:
        size: tokens. manifest: as written. vocab_size: token ids are below it. separator: the id that ends a document, or None.
        tokenizer: None for bytes, else `path`, absolute, and `sha256` of the file tokenizer.json. bytes_per_token: on average.
        chat_template: with which conversations were packed, or None.

    Raises:
        DataError: not a packed file; the manifest is missing or damaged; file and manifest do not belong together.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.raw = ByteFile(path, packed=True)
        self.path = self.raw.path
        self.manifest = manifest = _manifest(self.path)
        self.dtype = np.dtype(manifest["dtype"]).newbyteorder("<")
        self.size = manifest["tokens"]
        self.vocab_size = manifest["vocab_size"]
        self.bytes_per_token = manifest["bytes"] / max(1, self.size)
        self.separator = manifest.get("separator")
        self.chat_template = manifest.get("chat_template")
        self.tokenizer = manifest.get("tokenizer")
        if self.tokenizer is not None:
            self.tokenizer = {**self.tokenizer, "path": str(self.path.resolve().parent / self.tokenizer["path"])}
        self.unit = "bytes" if self.tokenizer is None else "tokens"
        self._ends_at, self._mask_at, expected = packed_sections(
            self.size, self.dtype, manifest["documents"], manifest["masked"]
        )
        if not expected == manifest["size"] == self.raw.size:
            raise DataError(f"{self.path} has {self.raw.size:,} bytes instead of {expected:,}: pack it again")
        if self.raw.fingerprint()["blake2b"] != manifest["blake2b"]:
            raise DataError(f"{self.path} is not what was packed, its digest does not match: pack it again")
        ends = self.ends()  # the digest is of samples
        if ends[0] < 1 or ends[-1] != self.size or (ends[1:] <= ends[:-1]).any():
            raise DataError(f"{self.path} is damaged where it says how its documents end: pack it again")

    def windows(self, offsets_R: NDArray[np.int64], lengths_R: int | NDArray[np.int64]) -> NDArray[Any]:
        """As `ByteFile.windows`, of tokens in the file's dtype."""
        width = self.dtype.itemsize
        return self.raw.windows(len(PACKED_HEADER) + offsets_R * width, lengths_R * width).view(self.dtype)

    def counts(self, offsets_R: NDArray[np.int64], lengths_R: int | NDArray[np.int64]) -> NDArray[np.bool_] | None:
        """Which of the tokens in `windows` count as targets, in their shape, bool; None if all tokens do."""
        if not self.manifest["masked"]:
            return None
        lengths = np.broadcast_to(lengths_R, offsets_R.shape)
        sizes = (offsets_R % 8 + lengths + 7) // 8
        bits = np.unpackbits(self.raw.windows(self._mask_at + offsets_R // 8, sizes), bitorder="little").view(bool)
        skipped = 8 * (np.cumsum(sizes) - sizes) + offsets_R % 8 - (np.cumsum(lengths) - lengths)
        found = bits[np.arange(lengths.sum()) + np.repeat(skipped, lengths)]
        return found.reshape(len(offsets_R), -1) if np.ndim(lengths_R) == 0 else found

    def ends(self) -> NDArray[np.int64]:
        """Where each document ends, its separator included: (documents,), int64, rising; the last is `size`."""
        return self.raw.read(self._ends_at, 8 * self.manifest["documents"]).view("<i8")

    def fingerprint(self) -> dict[str, Any]:
        """As `ByteFile.fingerprint`, with the tokenizer's digest if there is one."""
        return self.raw.fingerprint() | ({"tokenizer": self.tokenizer["sha256"]} if self.tokenizer else {})

    def digest(self) -> str | None:
        """As `ByteFile.digest`."""
        return self.raw.digest()


def open_file(path: str | os.PathLike[str]) -> ByteFile | PackedFile:
    """A packed file, or any other as bytes. Raises `DataError` as they do."""
    file = ByteFile(path, packed=True)
    return PackedFile(path) if file.packed else file


def packed_sections(tokens: int, dtype: Any, documents: int, masked: bool) -> tuple[int, int, int]:
    """The bytes at which ends and mask of a packed file begin, and its size."""
    ends = len(PACKED_HEADER) + -(-tokens * np.dtype(dtype).itemsize // 8) * 8
    mask = ends + 8 * documents
    return ends, mask, mask + -(-tokens // 8) * masked


def packed_manifest(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _manifest(path: Path) -> dict[str, Any]:
    place = packed_manifest(path)
    try:
        manifest = read_json(place)
    except FileNotFoundError as error:
        raise DataError(f"{path} is a packed file without its manifest: copy {place.name} beside it") from error
    except CheckpointError as error:
        raise DataError(f"{error}; pack {path} again") from error
    wrong = [name for name, kind in _NEEDED.items() if not is_of(manifest.get(name), kind)]
    if not wrong and manifest.get("tokenizer") is not None:
        wrong = [name for name in ("path", "sha256") if not isinstance(manifest["tokenizer"].get(name), str)]
    if wrong or manifest["format"] != PACKED_FORMAT or manifest["dtype"] not in DTYPES or manifest["documents"] < 1:
        raise DataError(f"{place} is damaged or of another version ({(wrong or ['format'])[0]!r}): pack {path} again")
    return manifest
