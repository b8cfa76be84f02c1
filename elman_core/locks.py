"""File locks that child processes inherit. A lock lasts until the last of these processes ends, however it ends.

A lock is a regular file, opened without following links, and written only by its owner: in a folder that all users share,
anyone can plant a link or a pipe under its name.
"""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from elman_core.registry.errors import ConfigError, StorageError, printable
from elman_core.storage import open_regular

MACHINE_WIDE = Path("/tmp/elman-locks")
"""The folder of the GPUs' locks, for all users of a machine. Not TMPDIR, which differs between users and batch jobs."""


class Lock:
    """An advisory lock (flock) on a file. It belongs to the open file, not to the process: a child that inherits `fd` keeps it
    when this process closes it or dies. It is only closed, never unlocked, since unlocking would take it from the children.

    Raises:
        BlockingIOError: another process has it. StorageError: the file cannot be opened.
    """

    def __init__(self, path: Path, shared: bool = False) -> None:
        if fcntl is None:
            raise ConfigError("this needs the file locks of Linux or macOS")
        self.path = path
        self.fd = _create(path, shared)
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self.fd)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise BlockingIOError(error.errno, "locked", str(path)) from error
            raise StorageError(f"cannot lock {path}: {error.strerror}") from error

    def write(self, text: str) -> None:
        """Write the owner of the lock into the file, unless the file belongs to another user or has other hard links."""
        status = os.fstat(self.fd)
        if status.st_uid != os.geteuid() or status.st_nlink != 1:
            return
        try:
            os.ftruncate(self.fd, 0)
            os.pwrite(self.fd, text.encode(), 0)
        except OSError as error:
            if error.errno not in (errno.EBADF, errno.EINVAL):  # opened for reading only
                raise StorageError(f"cannot write {self.path}: {error.strerror}") from error

    def close(self) -> None:
        """Release the lock; a child that inherited it keeps it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def is_locked(path: Path) -> bool:
    """Whether a process has the lock now. The test itself holds it for a moment, so others must try more than once."""
    try:
        fd = _open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    if fcntl is None:
        os.close(fd)
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def lock_soon(path: Path, seconds: float = 1.0) -> Lock:
    """Take the lock, trying for some seconds, because `is_locked` may hold it. Raises `BlockingIOError`, `StorageError`."""
    end = time.monotonic() + seconds
    while True:
        try:
            return Lock(path)
        except BlockingIOError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)


def holder(path: Path) -> str:
    """The text that the owner of a lock wrote into it."""
    try:
        with open(_open(path, os.O_RDONLY), "rb") as file:
            return printable(file.read(200).decode(errors="replace").strip()) or "another process"
    except OSError:
        return "another process"


def _open(path: Path, flags: int) -> int:
    """A regular file, not through a link. Raises `StorageError` for anything else, `OSError` if it cannot be opened."""
    try:
        return open_regular(path, flags | getattr(os, "O_NOFOLLOW", 0))
    except OSError as error:
        what = {errno.ELOOP: "a link", errno.EMLINK: "a link", errno.EINVAL: "not a regular file"}.get(error.errno or 0)
        if what is None:
            raise
        raise StorageError(f"{path} is {what}, but should be a lock file: remove it") from error


def _create(path: Path, shared: bool) -> int:
    """The file of a lock, made if missing; `shared`: every user of the machine may lock it, in a folder like /tmp.

    In such a folder Linux refuses to open another user's file with O_CREAT (fs.protected_regular), so creating and opening
    are two steps. A lock needs no right to write.
    """
    hint = "; set ELMAN_LOCKS to a folder of this machine" if shared else ""
    try:
        if not shared:
            return _open(path, os.O_RDWR | os.O_CREAT)
        if not path.parent.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.parent.chmod(0o1777)
        if path.parent == MACHINE_WIDE and path.parent.is_symlink():
            raise StorageError(f"{path.parent} is a link, which another user may have planted; remove it{hint}")
        try:
            fd = _open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            os.fchmod(fd, 0o666)  # whatever the umask
            return fd
        except FileExistsError:
            try:
                return _open(path, os.O_RDWR)
            except PermissionError:
                return _open(path, os.O_RDONLY)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(f"cannot open {path}: {error.strerror}{hint}") from error
