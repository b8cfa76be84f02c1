"""Locks of schedulers, jobs and GPUs: they say who has them, and those of GPUs are shared by all users of a machine."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from elman_core.extension import Lock as CoreLock
from elman_core.extension import StorageError, open_lock, printable

MACHINE_WIDE = Path("/tmp/elman-locks")
"""The folder of the GPUs' locks, for all users of a machine. Not TMPDIR, which differs between users and batch jobs."""


class Lock(CoreLock):
    """A lock of the core whose file says who has it, and is written only by its owner."""

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


class SharedLock(Lock):
    """A lock that every user of the machine may take, in a folder like /tmp, which is made if missing.

    In such a folder Linux refuses to open another user's file with O_CREAT (fs.protected_regular), so creating and opening
    are two steps. A lock needs no right to write.
    """

    def _open(self) -> int:
        path = self.path
        hint = "; set ELMAN_LOCKS to a folder of this machine"
        try:
            with contextlib.suppress(FileExistsError):  # another user may make it at this moment
                path.parent.mkdir(parents=True)
                path.parent.chmod(0o1777)
            if path.parent == MACHINE_WIDE and path.parent.is_symlink():
                raise StorageError(f"{path.parent} is a link, which another user may have planted; remove it{hint}")
            try:
                fd = open_lock(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
                os.fchmod(fd, 0o666)  # whatever the umask
                return fd
            except FileExistsError:
                try:
                    return open_lock(path, os.O_RDWR)
                except PermissionError:
                    return open_lock(path, os.O_RDONLY)
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise StorageError(f"cannot open {path}: {error.strerror}{hint}") from error


def is_locked(path: Path) -> bool:
    """Whether a process has the lock now. The test itself holds it for a moment, so others must try more than once."""
    try:
        fd = open_lock(path, os.O_RDONLY)
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
        with open(open_lock(path, os.O_RDONLY), "rb") as file:
            return printable(file.read(200).decode(errors="replace").strip()) or "another process"
    except OSError:
        return "another process"
