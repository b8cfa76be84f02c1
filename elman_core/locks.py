"""File locks that child processes inherit. A lock lasts until the last of these processes ends, however it ends.

A lock is a regular file, opened without following links: in a folder that others may write to, they can plant a link or a pipe
under its name.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from elman_core.registry.errors import ConfigError, StorageError
from elman_core.storage import open_regular


class Lock:
    """An advisory lock (flock) on a file. It belongs to the open file, not to the process: a child that inherits `fd` keeps it
    when this process closes it or dies. It is only closed, never unlocked, since unlocking would take it from the children.

    Raises:
        BlockingIOError: another process has it. StorageError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        if fcntl is None:
            raise ConfigError("this needs the file locks of Linux or macOS")
        self.path = path
        try:
            self.fd = self._open()
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise StorageError(f"cannot open {path}: {error.strerror}") from error
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self.fd)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise BlockingIOError(error.errno, "locked", str(path)) from error
            raise StorageError(f"cannot lock {path}: {error.strerror}") from error

    def _open(self) -> int:
        """The file, made if missing."""
        return open_lock(self.path, os.O_RDWR | os.O_CREAT)

    def close(self) -> None:
        """Release the lock; a child that inherited it keeps it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def open_lock(path: Path, flags: int) -> int:
    """A regular file, not through a link. Raises `StorageError` for anything else, `OSError` if it cannot be opened."""
    try:
        return open_regular(path, flags | getattr(os, "O_NOFOLLOW", 0))
    except OSError as error:
        what = {errno.ELOOP: "a link", errno.EMLINK: "a link", errno.EINVAL: "not a regular file"}.get(error.errno or 0)
        if what is None:
            raise
        raise StorageError(f"{path} is {what}, but should be a lock file: remove it") from error
