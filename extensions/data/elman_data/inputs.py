"""What `elman data pack` reads: which files, in which units of work, and the documents of a unit.

A unit is a part of the inputs that one process packs at a time: about UNIT bytes of JSON lines or of small text files, a row
group of a Parquet file, or else a whole file. Units depend on the inputs alone, not on how many processes work.
"""

from __future__ import annotations

import contextlib
import glob
import gzip
import importlib
import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from elman_core.extension import PACKED_HEADER, ConfigError, DataError, how_to_install, open_regular

try:
    from orjson import loads
except ImportError:
    from json import loads  # type: ignore[assignment]

UNIT = 32 << 20
SEPARATOR = b"\x1e"
TEXT, LINES, TABLES = (".txt", ".md", ".text"), (".jsonl", ".ndjson"), (".parquet", ".arrow")
PACKINGS = (".gz", ".zst")


@dataclass(frozen=True)
class Long:
    """A text of more than UNIT bytes, which stays in its file: the bytes from `first` to before `end`."""

    name: str
    first: int
    end: int

    def __len__(self) -> int:
        return self.end - self.first

    def __bytes__(self) -> bytes:
        return b"".join(self.parts())

    def parts(self) -> Iterator[bytes]:
        """The text, 1 MiB at a time. Raises `DataError` if the file has become shorter."""
        return parts_of(self.name, self.first, len(self))


def parts_of(name: str, first: int, size: int) -> Iterator[bytes]:
    """So many bytes of a file, 1 MiB at a time. Raises `DataError` if it ends before."""
    with open(open_regular(name), "rb") as file:
        file.seek(first)
        while size:
            part = file.read(min(size, 1 << 20))
            if not part:
                raise DataError(f"{name} changed while it was packed: the same command packs it again")
            size -= len(part)
            yield part


Document = bytes | str | dict[str, Any] | Long
"""A text, or a record of which the encoder takes its part."""


@dataclass(frozen=True)
class Unit:
    """A unit of work.

    Attributes:
        kind: "text", "lines", "parquet", "arrow" or "dataset". paths: of the files, for "text" several.
        first, end: bytes of a file of lines, the number of a row group, or rows of a data set; end 0: all.
        size: bytes of input, for the progress.
    """

    kind: str
    paths: tuple[str, ...]
    size: int
    first: int = 0
    end: int = 0

    @property
    def sources(self) -> tuple[str, ...]:
        """Its files, or the folder of its data set."""
        return self.paths[:1] if self.kind == "dataset" else self.paths


def find(inputs: Sequence[str]) -> tuple[list[Path], int]:
    """The files behind files, folders and globs, in the order of their names, each once; and how many others folders hold.

    A folder that `datasets` has saved stands for itself.

    Raises:
        DataError: an input is missing, or holds no file that can be read.
    """
    found: dict[str, Path] = {}
    passed = 0
    for text in inputs:
        names = [text] if os.path.exists(text) else sorted(glob.glob(text, recursive=True))
        here: list[Path] = []
        for path in map(Path, names):
            if path.is_dir() and not is_dataset(path):
                inside, others = _below(path)
                here += inside
                passed += others
            elif path.is_dir() or names == [text] or kind_of(path) is not None:
                here.append(path)
            else:
                passed += 1
        if not here:
            raise DataError(f"{text}: there is no such file, or none that is read: {', '.join(readable())}")
        for path in here:
            if not path.is_dir() and kind_of(path) is None:
                raise DataError(f"{path} is not read: rename it to one of {', '.join(readable())}")
            found.setdefault(os.path.realpath(path), path)
    return list(found.values()), passed


def _below(folder: Path) -> tuple[list[Path], int]:
    """The files and data sets below a folder that are read, and how many other files it holds."""
    found: list[Path] = []
    others = 0
    entered = {os.path.realpath(folder)}  # links may lead in a circle
    for place, folders, files in os.walk(folder, onerror=_unreadable, followlinks=True):
        inside = {f: os.path.realpath(Path(place, f)) for f in sorted(folders) if not f.startswith(".")}
        folders[:] = [f for f, real in inside.items() if real not in entered]
        entered.update(inside.values())
        if is_dataset(Path(place)):
            folders.clear()
            found.append(Path(place))
            continue
        good = [f for f in sorted(files) if not f.startswith(".") and kind_of(Path(f)) is not None]
        found += [Path(place, f) for f in good]
        others += len(files) - len(good)
    return found, others


def _unreadable(error: OSError) -> None:
    raise DataError(f"{error.filename} cannot be read: {error.strerror}") from error


def readable() -> list[str]:
    """The ends of names that are read."""
    return [*TEXT, *LINES, *TABLES, *(f"{kind}{packing}" for kind in (".txt", ".jsonl") for packing in PACKINGS)]


def is_dataset(path: Path) -> bool:
    """Whether `datasets.save_to_disk` has written this folder."""
    return (path / "dataset_dict.json").is_file() or (path / "dataset_info.json").is_file()


def kind_of(path: Path) -> str | None:
    """The kind of a file, by its name; None for one that is not read."""
    suffixes = path.name.lower().removesuffix(".gz").removesuffix(".zst")
    suffix = os.path.splitext(suffixes)[1]
    if suffix in LINES:
        return "lines"
    if suffix in TEXT:
        return "text"
    return suffix[1:] if suffix in TABLES and suffixes == path.name.lower() else None


def units(files: Iterable[Path]) -> Iterator[Unit]:
    """The units of work of these files.

    Raises:
        DataError: a file cannot be read. ConfigError: a library is missing; says what to install.
    """
    small: list[str] = []
    together = 0  # bytes of the small ones
    for path in files:
        if path.is_dir():
            yield from _dataset_units(path)
            continue
        with _reading(str(path)):
            kind, size = kind_of(path), os.stat(path).st_size
        if kind == "text" and not _packed(path) and size < UNIT:
            if together + size > UNIT:
                yield Unit("text", tuple(small), together)
                small, together = [], 0
            small.append(str(path))
            together += size
        elif kind == "lines" and not _packed(path):
            yield from (
                Unit("lines", (str(path),), min(UNIT, size - first), first, first + UNIT)
                for first in range(0, size, UNIT)
            )
        elif kind == "parquet":
            with _reading(str(path)), _library("pyarrow.parquet", "parquet").ParquetFile(path) as file:
                groups = file.metadata.num_row_groups
            yield from (Unit("parquet", (str(path),), size // groups, group) for group in range(groups))
        else:
            yield Unit(str(kind), (str(path),), size)
    if small:
        yield Unit("text", tuple(small), together)


def documents(unit: Unit) -> Iterator[Document]:
    """The documents of a unit, in their order.

    Raises:
        DataError: names the file and the line that is not what its name says.
    """
    return _READERS[unit.kind](unit)


def _texts(unit: Unit) -> Iterator[Document]:
    for name in unit.paths:
        with _reading(name), _opened(name) as file:
            long: Long | None = None
            text = file.read(UNIT)
            if text.startswith(PACKED_HEADER):
                raise DataError(f"{name} is a packed file, not a text: train on it, or leave it out")
            while part := file.read(max(UNIT, len(text))):
                *whole, text = text.split(SEPARATOR)
                yield from whole
                if len(text) < UNIT or _packed(Path(name)):
                    text += part
                    continue
                first = file.tell() - len(part) - len(text)
                while SEPARATOR not in part and (more := file.read(UNIT)):
                    part = more
                _, mark, text = part.partition(SEPARATOR)
                long = Long(name, first, file.tell() - len(mark) - len(text))
                yield long
            if text or long is None:  # otherwise the last was long
                yield from text.removesuffix(SEPARATOR).split(SEPARATOR)


def _lines(unit: Unit) -> Iterator[Document]:
    (name,) = unit.paths
    with _reading(name), _opened(name) as file:
        for i, line in enumerate(_part(file, unit.first, unit.end)):
            try:
                record = loads(line.removesuffix(b"\n"))  # a decoder counts lines, too
            except ValueError as error:
                if not line.strip():
                    continue
                is_utf8 = line.decode(errors="ignore").encode() == line
                said = str(error) if is_utf8 else "invalid UTF-8"
                raise DataError(f"{name}, line {_number(file, unit, i)}: {said}; mend or delete the line") from error
            if type(record) is not dict:
                raise DataError(f"{name}, line {_number(file, unit, i)}: it is no JSON object")
            yield record


def _part(file: IO[bytes], first: int, end: int) -> Iterator[bytes]:
    """The lines that begin in a part of a file. end: 0 is its end."""
    at = file.seek(first - 1) + len(file.readline()) if first else 0
    while (at < end or not end) and (line := file.readline()):
        at += len(line)
        yield line


def _number(file: IO[bytes], unit: Unit, i: int) -> str:
    """Of the line `i` of a unit, in its file."""
    before = 0
    if unit.first:
        file.seek(0)
        before = sum(1 for _ in _part(file, 0, unit.first))
    return f"{before + i + 1:,}"


def _parquet(unit: Unit) -> Iterator[Document]:
    (name,) = unit.paths
    parquet = _library("pyarrow.parquet", "parquet")
    with _reading(name), parquet.ParquetFile(name, page_checksum_verification=True) as file:
        yield from file.read_row_group(unit.first).to_pylist()


def _arrow(unit: Unit) -> Iterator[Document]:
    (name,) = unit.paths
    arrow = _library("pyarrow", "parquet")
    with _reading(name), arrow.memory_map(name) as file:
        magic = file.read(6)
        file.seek(0)
        if magic == b"ARROW1":
            reader = arrow.ipc.open_file(file)
            batches: Iterable[Any] = (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            batches = arrow.ipc.open_stream(file)
        for batch in batches:
            yield from batch.to_pylist()


def _dataset_units(path: Path) -> Iterator[Unit]:
    step = 16_384
    size = sum(p.stat().st_size for p in path.rglob("*.arrow"))
    sets = _load_dataset(str(path))
    rows = sum(map(len, sets.values())) or 1
    for name, rows_of in sets.items():
        for first in range(0, len(rows_of), step):
            end = min(first + step, len(rows_of))
            yield Unit("dataset", (str(path), name), size * (end - first) // rows, first, end)


def _dataset(unit: Unit) -> Iterator[Document]:
    path, name = unit.paths
    with _reading(path):
        yield from _load_dataset(path)[name].select(range(unit.first, unit.end)).to_list()


def _load_dataset(path: str) -> dict[str, Any]:
    with _reading(path):
        loaded = _library("datasets", "datasets").load_from_disk(path)
    return dict(loaded) if isinstance(loaded, dict) else {"": loaded}


_READERS: dict[str, Callable[[Unit], Iterator[Document]]] = {
    "text": _texts, "lines": _lines, "parquet": _parquet, "arrow": _arrow, "dataset": _dataset,
}  # fmt: skip


def _packed(path: Path) -> bool:
    return path.name.lower().endswith(PACKINGS)


@contextlib.contextmanager
def _opened(name: str) -> Iterator[IO[bytes]]:
    """The file, unpacked while it is read."""
    with open(open_regular(name), "rb", 1 << 16) as file:
        if name.lower().endswith(".gz"):
            with gzip.open(file) as unpacked:
                yield io.BufferedReader(unpacked, 1 << 16)  # type: ignore[type-var]
        elif name.lower().endswith(".zst"):
            parts = _frames(file, _library("zstandard", "zst").ZstdDecompressor())
            yield io.BufferedReader(_Unpacked(parts), 1 << 16)
        else:
            yield file


class _Unpacked(io.RawIOBase):
    """A stream of these parts."""

    def __init__(self, parts: Iterator[bytes]) -> None:
        self.parts, self.left = parts, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, room: Any) -> int:
        while not self.left:
            if (part := next(self.parts, None)) is None:
                return 0
            self.left = memoryview(part)
        size = min(len(room), len(self.left))
        room[:size], self.left = self.left[:size], self.left[size:]
        return size


def _frames(file: IO[bytes], library: Any) -> Iterator[bytes]:
    """What the frames of a .zst file hold. Raises `EOFError` if the last is cut short: `stream_reader` takes it for whole."""
    frame = None
    while part := file.read(1 << 14):
        while part:
            if frame is None or frame.eof:
                frame = library.decompressobj()
            yield frame.decompress(part)
            part = frame.unused_data
    if frame is None or not frame.eof:
        raise EOFError("Compressed file ended before the end of its last frame")


@contextlib.contextmanager
def _reading(name: str) -> Iterator[None]:
    """Turns whatever a library raises inside into a `DataError` that names the file."""
    try:
        yield
    except (DataError, ConfigError):
        raise
    except Exception as error:
        said = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}".split("\n")[0]
        raise DataError(f"{name} cannot be read: {said}") from error


def _library(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ConfigError(f"this needs {package}: {how_to_install(f'elman-data[{extra}]')}") from error
