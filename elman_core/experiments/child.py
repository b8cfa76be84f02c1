"""The process around one attempt of a job: it notes the exit code, so that nothing is lost when the scheduler is killed.

`python -m elman_core.experiments.child EXIT_FILE LOCK_FDS COMMAND...` leads a process group of its own. It keeps the locks
it inherits and hands them to the command; when the command ends, it ends what the command left running, writes the code as
JSON, and leaves with it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

GRACE = 5.0
"""Seconds for what a command leaves running, such as an uploader, to end after SIGTERM."""


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code as a shell gives it."""
    exit_file, fds, *command = arguments
    locks = [int(fd) for fd in fds.split(",") if fd]
    # The group gets the scheduler's signals. A handler, unlike SIG_IGN, is not inherited by the command.
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, _wait_for_the_command)
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
    _write(exit_file, {"exit_code": code, "started": started, "ended": time.time()})
    return code


def _wait_for_the_command(_signum: int, _frame: Any) -> None:
    return


def _end_leftovers() -> None:
    """SIGTERM, then SIGKILL, to the processes of this group that outlived the command."""
    if not (left := _others()):
        return
    for signum in (signal.SIGTERM, signal.SIGKILL):
        for pid in left:
            try:
                os.kill(pid, signum)
            except ProcessLookupError:
                continue
        end = time.monotonic() + GRACE
        while left and time.monotonic() < end:
            time.sleep(0.05)
            left = _others()


def _others() -> list[int]:
    """Live processes of this process's group but itself."""
    import psutil

    group, found = os.getpgrp(), []
    for process in psutil.process_iter():
        try:
            mine = process.pid not in (0, os.getpid()) and os.getpgid(process.pid) == group
            if mine and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (psutil.Error, ProcessLookupError, PermissionError):
            continue
    return found


def _write(path: str, value: dict[str, Any]) -> None:
    partial = f"{path}.partial"
    with open(partial, "w", encoding="utf-8") as out:
        json.dump(value, out)
        out.flush()
        os.fsync(out.fileno())
    os.replace(partial, path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
