"""The demo corpus: the source text of the Python standard library on this machine. Real text, present everywhere."""

from __future__ import annotations

import os
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from elman_core.extension import ByteFile, DataError, StorageError, cache_dirs, replacing

_LEFT_OUT = frozenset(
    {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
)


def standard_library_corpus() -> Path:
    """The corpus as a file of documents, each ended by 0x1e. Written on the first call, in one rename.

    It is kept in the cache. Modules are in order of their paths; tests, tables of character sets and what is not UTF-8 are left
    out.

    Raises:
        DataError: this Python carries no source text. StorageError: the file cannot be written.
    """
    version = f"{platform.python_implementation().lower()}-{platform.python_version()}"
    path = cache_dirs()[0] / "corpora" / f"{version}-standard-library.txt"
    if path.exists():
        return path
    source = Path(sysconfig.get_paths()["stdlib"])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as out:
            for text in documents(source):
                out.write(text + bytes([ByteFile.separator]))
            if out.tell() == 0:
                raise DataError(f"{source} holds no Python source text: give a file with --data FILE")
    except OSError as error:
        raise StorageError(f"cannot write the corpus {path}: {error.strerror or error}; set ELMAN_CACHE") from error
    return path


def documents(folder: Path) -> Iterator[bytes]:
    """The text of every module below `folder`, ordered by its path."""
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(f for f in folders if f not in _LEFT_OUT)
        for name in sorted(f for f in files if f.endswith(".py")):
            text = (Path(place) / name).read_bytes()
            is_utf8 = text.decode(errors="ignore").encode() == text
            if text.strip() and ByteFile.separator not in text and b"\0" not in text and is_utf8:
                yield text
