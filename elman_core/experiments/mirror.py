"""Sending the files of a run from where it trains to where it is kept, as it goes on: pieces that any channel can carry.

What arrives is at every moment a run that can be resumed: metrics come before the checkpoint that counts their steps, a
checkpoint appears under its name when it is whole, and the manifest says that all is done when all has come.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from elman_core.storage import remove_folder, sync

MANIFEST, CHECKPOINTS = "manifest.json", "checkpoints"  # of `elman_core.training.run`, which needs torch
_CHECKPOINT = re.compile(r"step-\d{8,}")
PIECE = 4 << 20
BATCH = 16 << 20
_GROWS = (".jsonl", ".log")
_PARTIAL = ".partial-"  # `remove_leftovers` clears such names away


@dataclass(frozen=True)
class Piece:
    """A part of a file.

    Attributes:
        path: below the common root, with slashes. data: bytes from `offset` on. last: the file ends here.
        kind: "append" to the file; "replace" it once the last piece is there; "checkpoint": a file of a folder that gets
            its name at the piece whose path is the folder's; "remove" a checkpoint; "forget" what came of one.
    """

    path: str
    data: bytes = b""
    offset: int = 0
    last: bool = True
    kind: Literal["append", "replace", "checkpoint", "remove", "forget"] = "replace"


class Sender:
    """Finds out what has changed.

    Args:
        root: what paths are relative to. run: a run's folder below it, or None. files: further files, such as a log.

    Files that are there already count as sent.
    """

    def __init__(self, root: Path, run: Path | None, files: Sequence[Path] = ()) -> None:
        self.root, self.run, self.files = root, run, list(files)
        self._sent: dict[Path, tuple[int, int, int]] = {}  # inode, size, time of change
        self._checkpoints = set(self._complete())
        for path in self._plain():
            self._sent[path] = _stamp(path)
        self._sweep: Iterator[Piece] | None = None

    @classmethod
    def everything(cls, root: Path, run: Path | None, files: Sequence[Path] = ()) -> Sender:
        """A sender of what is there, of the checkpoints only the last."""
        sender = cls(root, run, files)
        sender._sent.clear()
        sender._checkpoints = set(sender._complete()[:-1])
        return sender

    def batch(self, most: int = BATCH) -> tuple[list[Piece], bool]:
        """The next pieces, of `most` bytes or little more, and whether that was all there is now."""
        if self._sweep is None:
            self._sweep = self._all()
        pieces: list[Piece] = []
        size = 0
        for piece in self._sweep:
            pieces.append(piece)
            size += len(piece.data)
            if size >= most:
                return pieces, False
        self._sweep = None
        return pieces, True

    def _all(self) -> Iterator[Piece]:
        """One sweep. The manifest and the list of checkpoints are read first, so that what they promise is sent before them."""
        manifest = self._manifest()
        there = self._complete()
        for path in self._plain():
            if path.name != MANIFEST or path.parent != self.run:
                yield from self._file(path)
        if manifest is not None and manifest[0] not in self._sent and json.loads(manifest[1]).get("status") != "ok":
            yield Piece(self._name(manifest[0]), manifest[1])  # without it, checkpoints are not a run
        for path in there:
            if path not in self._checkpoints:
                yield from self._checkpoint(path)
        for gone in sorted(self._checkpoints - set(there)):
            self._checkpoints.remove(gone)
            yield Piece(self._name(gone), kind="remove")
        if manifest is not None and self._sent.get(manifest[0]) != manifest[2]:
            self._sent[manifest[0]] = manifest[2]
            yield Piece(self._name(manifest[0]), manifest[1])

    def _manifest(self) -> tuple[Path, bytes, tuple[int, int, int]] | None:
        path = None if self.run is None else self.run / MANIFEST
        return None if path is None or not path.exists() else (path, path.read_bytes(), _stamp(path))

    def _complete(self) -> list[Path]:
        """Checkpoints, earliest first: what has such a name is whole."""
        folder = None if self.run is None else self.run / CHECKPOINTS
        found = folder.iterdir() if folder is not None and folder.is_dir() else ()
        return sorted((p for p in found if _CHECKPOINT.fullmatch(p.name)), key=lambda p: int(p.name[5:]))

    def _plain(self) -> Iterator[Path]:
        """Files that may change: all but locks, unfinished writing and checkpoints."""
        yield from (path for path in self.files if path.exists())
        if self.run is None or not self.run.is_dir():
            return
        for place, folders, files in os.walk(self.run):
            folders[:] = sorted(
                f for f in folders if not f.startswith(".") and Path(place, f) != self.run / CHECKPOINTS
            )
            yield from (Path(place, name) for name in sorted(files) if not name.startswith("."))

    def _file(self, path: Path) -> Iterator[Piece]:
        try:
            stamp = _stamp(path)
            before = self._sent.get(path)
            if stamp == before:
                return
            grown = before is not None and path.suffix in _GROWS and before[0] == stamp[0] and before[1] <= stamp[1]
            start = before[1] if grown and before is not None else 0
            yield from self._pieces(path, start, stamp[1], "append" if grown else "replace")
            self._sent[path] = stamp
        except FileNotFoundError:
            return  # replaced or removed meanwhile: the next sweep sees what is there then

    def _checkpoint(self, folder: Path) -> Iterator[Piece]:
        try:
            for path in sorted(p for p in folder.rglob("*") if p.is_file()):
                yield from self._pieces(path, 0, path.stat().st_size, "checkpoint")
        except FileNotFoundError:  # it was the oldest, and has been deleted
            yield Piece(self._name(folder), kind="forget")
            return
        self._checkpoints.add(folder)
        yield Piece(self._name(folder), kind="checkpoint")

    def _pieces(
        self, path: Path, start: int, end: int, kind: Literal["append", "replace", "checkpoint"]
    ) -> Iterator[Piece]:
        with path.open("rb") as opened:
            opened.seek(start)
            while True:
                data = opened.read(min(PIECE, end - start))
                last = start + len(data) >= end or not data
                yield Piece(self._name(path), data, start, last, kind)
                start += len(data)
                if last:
                    return

    def _name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()


class Receiver:
    """Puts pieces, in the order in which they were sent, into the files below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def put(self, piece: Piece) -> Path | None:
        """Write a piece. Returns the file or folder that it made whole, if any."""
        path = self.root / piece.path
        if piece.kind == "append":
            with path.open("r+b") as out:
                out.seek(piece.offset)
                out.write(piece.data)
            return path if piece.last else None
        if piece.kind == "replace":
            return self._replace(path, piece)
        return self._of_checkpoint(path, piece)

    def _replace(self, path: Path, piece: Piece) -> Path | None:
        partial = path.with_name(f"{_PARTIAL}{path.name}")
        _write(partial, piece)
        if not piece.last:
            return None
        sync(partial)
        os.replace(partial, path)
        return path

    def _of_checkpoint(self, path: Path, piece: Piece) -> Path | None:
        parts = piece.path.split("/")
        depth = parts.index(CHECKPOINTS) + 2
        folder = self.root.joinpath(*parts[:depth])
        partial = folder.with_name(f"{_PARTIAL}{folder.name}")
        if piece.kind == "remove":
            if folder.is_dir():
                remove_folder(folder)
        elif piece.kind == "forget":
            shutil.rmtree(partial, ignore_errors=True)
        elif len(parts) > depth:
            target = partial.joinpath(*parts[depth:])
            _write(target, piece)
            if piece.last:
                sync(target)
        elif folder.is_dir():  # it came in an earlier attempt
            shutil.rmtree(partial, ignore_errors=True)
        else:
            sync(partial)
            os.rename(partial, folder)
            sync(folder.parent)
            return folder
        return None


def _write(path: Path, piece: Piece) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb" if piece.offset == 0 else "r+b") as out:
        out.seek(piece.offset)
        out.write(piece.data)


def _stamp(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns
