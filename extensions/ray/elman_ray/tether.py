"""The process around a job on a node: as `elman_bench.jobs.child`, and the job ends once the node's actor is gone.

`python -m elman_ray.tether HOLDER EXIT_FILE LOCK_FDS COMMAND...`, where HOLDER is the process of the actor: Ray may end it on a
node that keeps running. The command is then told to save and end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time

import psutil
from elman_bench.jobs import child

SAVING = 120.0
"""Seconds that a command has to save and end after its holder is gone."""


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code as a shell gives it."""
    holder, *rest = arguments
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # the whole group gets them
        signal.signal(signum, lambda *_: None)
    if pid := os.fork():  # Ray kills the direct children of its processes, so a grandchild does the work
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    threading.Thread(target=_watch, args=(int(holder),), daemon=True).start()
    return child.main(rest)


def _watch(holder: int) -> None:
    """Once process `holder` has ended, tell the command to save and end, and kill it if it does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        held = psutil.Process(holder)
        while held.is_running():
            time.sleep(0.5)
    sys.stderr.write("the process that started this job has ended: the job is asked to save and stop\n")
    os.killpg(0, signal.SIGTERM)
    time.sleep(SAVING)
    for command in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            command.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
