"""Safe writing: a kill, a full disk or a bad sector never leads to wrong data being read.

A folder is written under a temporary name beside its place, every file is synchronised to the disk, its checksums are added,
and then it is renamed. So a file under its final name is complete, and later damage is detected and reported.
JSON objects carry a digest of themselves, and the lines of a log a CRC.

Others may be able to write in the same folder. So a temporary name is random and new, and nothing is written through a link;
only regular files are opened, of a bounded size where a file is read as a whole.
"""

from __future__ import annotations

import datetime
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from elman_core.registry.errors import DIRECTIONS, CheckpointError, ConfigError, StorageError, did_you_mean, printable

CHECKSUMS = "checksums.json"
DIGEST = "digest"
_CRC = b', "crc32": "'
_EDITABLE = "README.md"  # a model card is for people to change
_LOADED = re.compile(r"(generation_)?config\.json|model[^/]*\.safetensors(\.index\.json)?")
PARTIAL = ".partial-"
DOOMED = ".deleting-"
MOST_READ = 1 << 28
"""Bytes of the largest file that is read as a whole."""


def now(timespec: str = "seconds") -> str:
    """The time in UTC, ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec=timespec)


@contextmanager
def storage_errors(what: str) -> Iterator[None]:
    """Operating-system errors inside become a `StorageError` that begins with `what`."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        hint = "; free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else ""
        raise StorageError(f"{what}: {error.strerror or error}{hint}") from error
    except Exception as error:  # safetensors reports a full disk as an exception of its own
        if type(error).__module__.startswith("safetensors"):
            raise StorageError(f"{what}: {error}") from error
        raise


def require_text(*names: str | Path | None) -> None:
    """Raise unless a recipe, a model card and a log can name all of them, and the targets of links, on one line of UTF-8.
    Raises `ConfigError`: a name is other bytes, or has a line break or another control character."""
    for name in (n for n in names if n is not None):
        try:
            whole = str(Path(name).expanduser().resolve())
        except (OSError, RuntimeError, ValueError) as error:
            raise ConfigError(f"{name} cannot be used: {getattr(error, 'strerror', None) or error}") from error
        if printable(whole, DIRECTIONS) != whole:
            raise ConfigError(
                f"{printable(whole)}: a recipe cannot store names with control characters or outside UTF-8; rename it"
            )


def open_regular(path: str | os.PathLike, flags: int = os.O_RDONLY) -> int:
    """The descriptor of a regular file; for writing not through a link. Raises `OSError`: it cannot be opened, or is something
    else: a pipe or a device is refused, not waited for."""
    nofollow = getattr(os, "O_NOFOLLOW", 0) if flags & (os.O_WRONLY | os.O_RDWR) else 0
    try:
        descriptor = os.open(path, flags | nofollow | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0), 0o666)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK) and nofollow:
            raise OSError(error.errno, "it is a link", str(path)) from error
        if error.errno != errno.ENXIO:  # a pipe that nobody reads, a socket
            raise
    raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def read_bytes(path: str | os.PathLike) -> bytes:
    """The content of a regular file. Raises `OSError`, also for one of more than `MOST_READ` bytes."""
    with open(open_regular(path), "rb") as file:
        content = file.read(MOST_READ + 1) or b""  # None: a file of the system that would be waited for
    if len(content) > MOST_READ:
        raise OSError(errno.EINVAL, f"it is longer than {MOST_READ:,} bytes", str(path))
    return content


def appending(path: Path) -> TextIO:
    """A text file to append to, made if it is missing. Raises `StorageError`."""
    with storage_errors(f"cannot write {path}"):
        return open(open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "a", encoding="utf-8")


def _beside(path: Path, prefix: str) -> Path:
    """A new name, which nobody can guess."""
    return path.with_name(f"{prefix}{secrets.token_hex(8)}-{path.name}")


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file to write to; at the end it replaces `path` in one step: readers see the old one or the new."""
    partial = _beside(path, PARTIAL)
    descriptor = open_regular(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(descriptor)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Replace `path` by a file with this text, in one step. Raises `StorageError`, also for more than `MOST_READ` bytes."""
    content = text.encode()
    if len(content) > MOST_READ:
        raise StorageError(f"cannot write {path}: {len(content):,} bytes are more than the {MOST_READ:,} that are read")
    with storage_errors(f"cannot write {path}"), replacing(path) as file:
        file.write(content)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """`write_text` of an object as indented JSON, with a digest of itself as its last entry."""
    value = {k: v for k, v in value.items() if k != DIGEST}
    write_text(path, json.dumps(value | {DIGEST: _digest(value)}, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, without its digest, which is compared; files of older versions have none. Raises
    `FileNotFoundError`, or `CheckpointError` for a file that cannot be read or is not the object that was written."""
    try:
        text = read_bytes(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        value = json.loads(text.decode())
        matches = isinstance(value, dict) and value.pop(DIGEST, None) in (None, _digest(value))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: it is not JSON") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is damaged: it is not a JSON object")
    if not matches:
        raise AlteredError(f"{path} was changed after it was written: its digest does not match", value)
    return value


class AlteredError(CheckpointError):
    """A JSON object that does not match its digest. `value`: the object."""

    def __init__(self, message: str, value: dict[str, Any]) -> None:
        super().__init__(message)
        self.value = value


def _digest(value: dict[str, Any]) -> str:
    """SHA-256 of an object as it is read back, whatever the order of its keys. ValueError for NaN, which is not JSON."""
    text = json.dumps(json.loads(json.dumps(value, allow_nan=False)), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def log_line(value: dict[str, Any], run: str) -> str:
    """An object as one line of JSON that ends with its CRC; the CRC includes `run`, the id of the run."""
    return _with_crc(json.dumps(value).encode(), run).decode()


def read_line(text: bytes, run: str | None) -> dict[str, Any] | None:
    """The object of a log's line, with `kind` and `step`. None if it is damaged or of another run.

    Args:
        run: the id of the run; empty for runs of older versions, whose lines have no CRC; None: not compared.
    """
    text = text.rstrip()
    body, ends, _ = text.rpartition(_CRC)
    if run is not None and (run or ends) and text != _with_crc(body + b"}", run):
        return None
    try:
        line = json.loads(text)
        valid = isinstance(line["kind"], str) and type(line["step"]) is int and 0 <= line["step"] < 2**53
        line.pop("crc32", None)
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError, IndexError):
        return None
    return line if valid else None


def _with_crc(text: bytes, run: str) -> bytes:
    return b'%b%b%08x"}' % (text[:-1], _CRC, zlib.crc32(text, zlib.crc32(run.encode())))


def sync(path: Path) -> None:
    """Flush a file or folder to the disk (Windows cannot open a folder; there it is left to the system)."""
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_folder(final: Path, fill: Callable[[Path], None], needed: int = 0) -> None:
    """Let `fill(folder)` write a folder, then give it the name `final`, complete with checksums, in one step.

    An empty folder of that name is replaced.

    Args:
        needed: bytes it will take; checked against the free space first.

    Raises:
        StorageError: not enough space, or writing failed. Nothing but the temporary folder was touched, and that is removed.
    """
    with storage_errors(f"cannot write {final}"):
        final.parent.mkdir(parents=True, exist_ok=True)
        if final.exists() and (not final.is_dir() or any(final.iterdir())):
            raise StorageError(f"{final} already exists, and nothing is overwritten")
        free = shutil.disk_usage(final.parent).free
        if free < needed:
            raise StorageError(f"cannot write {final}: it needs {needed / 1e6:.1f} MB and {free / 1e6:.1f} MB are free")
        partial = _beside(final, PARTIAL)
        partial.mkdir(0o700)  # until it is complete nobody else can put a link into it
        try:
            with _held(partial) as inside:
                fill(inside)
                write_checksums(inside)
                mode = (inside / CHECKSUMS).stat().st_mode
                for place, _, files in os.walk(inside, topdown=False):
                    for name in files:
                        os.chmod(Path(place, name), mode)  # safetensors writes for the owner alone
                        sync(Path(place, name))
                    sync(Path(place))
                # As the umask has it, which is known from a file, and with the parent's group bit.
                os.chmod(inside, stat.S_IMODE(inside.stat().st_mode) | stat.S_IMODE(mode) | (mode & 0o444) >> 2)
            os.rename(partial, final)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        sync(final.parent)


@contextmanager
def _held(folder: Path) -> Iterator[Path]:
    """A name of this very folder, even if somebody who may write beside it puts another in its place (on Linux)."""
    if not os.path.isdir("/proc/self/fd"):
        yield folder
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def remove_folder(path: Path) -> None:
    """Delete a folder so that no half of it is ever found under its name."""
    doomed = _beside(path, DOOMED)
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def remove_leftovers(parent: Path) -> None:
    """Delete what a killed writer or remover left in `parent`."""
    if parent.is_dir():
        for path in parent.iterdir():
            if path.name.startswith((PARTIAL, DOOMED)):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()


def checksums(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of every file below `folder` but the list itself and the model card."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    names = [p.relative_to(folder).as_posix() for p in files]
    return {n: _checksum(p) for n, p in zip(names, files, strict=True) if n not in (CHECKSUMS, _EDITABLE)}


def write_checksums(folder: Path) -> None:
    """Write `checksums.json` for what is in a folder now."""
    (folder / CHECKSUMS).unlink(missing_ok=True)
    write_text(folder / CHECKSUMS, json.dumps(checksums(folder), indent=2) + "\n")


def missing_folder(path: str | os.PathLike, others: Iterable[str] = ()) -> CheckpointError:
    """The error for a folder that is not there. It names the one that was meant: a folder beside it, or one of `others`."""
    known = [*map(str, Path(path).parent.glob("*/")), *others]
    return CheckpointError(f"there is no folder {str(path)!r}.{did_you_mean(str(path), known) or ' Check the path'}")


def check_folder(folder: Path, weights: bool = False) -> None:
    """Compare a folder with its checksums.

    Args:
        weights: look at the files that `from_pretrained` reads, and no others.

    Raises:
        CheckpointError: names the first file that is missing, truncated, altered or, if a model is made from it, not listed.
    """
    try:
        entries = json.loads(read_bytes(folder / CHECKSUMS).decode())
        listed = {n: (e["bytes"] + 0, e) for n, e in entries.items() if not weights or _LOADED.fullmatch(n)}
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder}: {CHECKSUMS} is missing") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{folder}: {CHECKSUMS} is damaged") from error
    if wrong := next(_wrong(folder, listed), None):
        hint = f"; copy or export it again, or delete {CHECKSUMS} if you changed it"
        of_a_run = any(name.startswith("state/") for name in entries)
        raise CheckpointError(f"{folder}: {wrong}{'' if of_a_run else hint}")


def _wrong(folder: Path, listed: dict[str, Any]) -> Iterator[str]:
    """What is wrong with the files of a folder, given their lengths and checksums."""
    for path in sorted(folder.iterdir()):
        if _LOADED.fullmatch(path.name) and path.name not in listed:
            yield f"{path.name} is not in {CHECKSUMS}, so it was added later"
    for name, (length, expected) in listed.items():
        path = folder / name
        try:
            if not path.is_file():
                yield f"{name} is missing"
            elif (size := path.stat().st_size) != length:
                what = "truncated" if size < length else "longer than it was"
                yield f"{name} is {what}: {size} bytes instead of {length}"
            elif _checksum(path) != expected:
                yield f"{name} has been altered: its checksum does not match"
        except (OSError, ValueError) as error:  # a bad sector, a name that no file can have
            yield f"{name} cannot be read: {getattr(error, 'strerror', None) or error}"


def _checksum(path: Path) -> dict[str, Any]:
    with open(open_regular(path), "rb") as opened:
        digest = hashlib.file_digest(opened, "sha256")
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}
