"""Writing that a kill, a full disk or a bad sector cannot turn into a wrong read.

A folder is written under a temporary name beside its place, every file is synchronised to the disk, its checksums are added,
and then it is renamed. So what has the final name is complete, and what was damaged afterwards is found out and named.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from elman_core.registry.errors import CheckpointError, ConfigError, StorageError

CHECKSUMS = "checksums.json"
_EDITABLE = "README.md"  # a model card is for people to change
_PARTIAL = ".partial-"
_DOOMED = ".deleting-"


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
    """Raise unless a recipe, a model card and a log, which are UTF-8, can name them all, where links and folders lead too.

    Raises:
        ConfigError: a name is other bytes.
    """
    for name in (n for n in names if n is not None):
        whole = str(Path(name).expanduser().resolve())
        try:
            whole.encode()
        except UnicodeEncodeError:
            shown = whole.encode(errors="backslashreplace").decode()
            raise ConfigError(f"{shown}: a name that is not UTF-8 fits in no recipe; rename it") from None


def write_text(path: Path, text: str) -> None:
    """Replace `path` in one step: readers see the old text or the new."""
    partial = path.with_name(f"{_PARTIAL}{path.name}")
    with storage_errors(f"cannot write {path}"):
        try:
            with partial.open("w", encoding="utf-8") as out:
                out.write(text)
                out.flush()
                os.fsync(out.fileno())
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        sync(path.parent)


def write_json(path: Path, value: Any) -> None:
    """`write_text` of indented JSON."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


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

    Args:
        needed: bytes it will take; checked against the free space first.

    Raises:
        StorageError: not enough space, or writing failed. Nothing but the temporary folder was touched, and that is removed.
    """
    with storage_errors(f"cannot write {final}"):
        final.parent.mkdir(parents=True, exist_ok=True)
        if final.exists():
            raise StorageError(f"{final} already exists, and nothing is overwritten")
        free = shutil.disk_usage(final.parent).free
        if free < needed:
            raise StorageError(f"cannot write {final}: it needs {needed / 1e6:.1f} MB and {free / 1e6:.1f} MB are free")
        partial = final.with_name(f"{_PARTIAL}{final.name}-{os.getpid()}")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir()
            fill(partial)
            write_json(partial / CHECKSUMS, checksums(partial))
            for place, _, files in os.walk(partial, topdown=False):
                for name in files:
                    sync(Path(place, name))
                sync(Path(place))
            os.rename(partial, final)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        sync(final.parent)


def remove_folder(path: Path) -> None:
    """Delete a folder so that no half of it is ever found under its name."""
    doomed = path.with_name(f"{_DOOMED}{path.name}")
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def remove_leftovers(parent: Path) -> None:
    """Delete what a killed writer or remover left in `parent`."""
    if parent.is_dir():
        for path in parent.iterdir():
            if path.name.startswith((_PARTIAL, _DOOMED)) and path.is_dir():
                shutil.rmtree(path)


def checksums(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of every file below `folder` but the list itself and the model card."""
    found = sorted(p for p in folder.rglob("*") if p.is_file())
    names = [p.relative_to(folder).as_posix() for p in found]
    return {n: _checksum(p) for n, p in zip(names, found, strict=True) if n not in (CHECKSUMS, _EDITABLE)}


def check_folder(folder: Path) -> None:
    """Compare a folder with its checksums.

    Raises:
        CheckpointError: names the first file that is missing, truncated or altered.
    """
    try:
        listed = {n: (e["bytes"], e) for n, e in json.loads((folder / CHECKSUMS).read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder}: {CHECKSUMS} is missing or damaged") from error
    for name, (length, expected) in listed.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{folder}: {name} is missing")
        size = path.stat().st_size
        if size != length:
            what = "truncated" if size < length else "longer than it was"
            raise CheckpointError(f"{folder}: {name} is {what}: {size} bytes instead of {length}")
        if _checksum(path) != expected:
            raise CheckpointError(f"{folder}: {name} has been altered: its checksum does not match")


def _checksum(path: Path) -> dict[str, Any]:
    with path.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256")
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}
