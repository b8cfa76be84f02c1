"""The process around one attempt of a job. It records the exit code, so that nothing is lost when the scheduler is killed.

`python -m elman_bench.jobs.child EXIT_FILE LOCK_FDS COMMAND...` leads its own process group. It passes the locks that it
inherits to the command. When the command ends, it ends all processes that the command left running, writes the exit code as
JSON, and exits with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from elman_core.extension import StorageError, write_json

PR_SET_CHILD_SUBREAPER = 36
GRACE = 5.0
"""Seconds that leftover processes of a command, such as an uploader, have to end after SIGTERM."""


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code as a shell gives it."""
    exit_file, fds, *command = arguments
    locks = [int(fd) for fd in fds.split(",") if fd]
    # The group gets the scheduler's signals. A handler, unlike SIG_IGN, is not inherited by the command.
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, lambda *_: None)
    _adopt()
    started = time.time()
    try:
        process = subprocess.Popen(command, pass_fds=locks, stdin=subprocess.DEVNULL)
    except OSError as error:
        sys.stderr.write(f"cannot start {command[0]}: {error.strerror}\n")  # into the log
        code = 126 if isinstance(error, PermissionError) else 127
    else:
        code = process.wait()
        code = 128 - code if code < 0 else code
        _end_leftovers()
    try:
        write_json(Path(exit_file), {"exit_code": code, "started": started, "ended": time.time()})
    except StorageError as error:  # the scheduler, if it is there, gets the code all the same
        with contextlib.suppress(OSError):
            sys.stderr.write(f"{error}\n")
            sys.stderr.flush()
    return code


def _adopt() -> None:
    """Become the parent of processes that the command leaves, also in new sessions. Works on Linux only."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _end_leftovers() -> None:
    """SIGTERM, then SIGKILL, to the processes that outlived the command."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        left = _others()
        for process in left:
            with contextlib.suppress(psutil.Error):  # it has ended, or is another user's
                process.send_signal(signum)
        psutil.wait_procs(left, GRACE)


def _others() -> list[psutil.Process]:
    """Live processes of this process's group but itself, and its descendants."""
    group = os.getpgrp()
    found = []
    below = set(psutil.Process().children(recursive=True))
    for process in psutil.process_iter():
        try:
            mine = process.pid not in (0, os.getpid(), os.getppid()) and os.getpgid(process.pid) == group
            if (mine or process in below) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, ProcessLookupError, PermissionError):
            continue
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
