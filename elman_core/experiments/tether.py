"""A command that does not outlive who started it: `python -m elman_core.experiments.tether PID COMMAND...`.

A process of a cluster's engine may be killed with its node's services while the machine goes on. When process PID is gone, the
command is told to save and end (SIGTERM), and killed if it has not in two minutes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

GRACE = 120.0
EVERY = 0.5  # seconds between two looks


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code as a shell gives it."""
    import psutil

    parent, *command = arguments
    # Signals come to the whole group; a handler, unlike SIG_IGN, is not inherited by the command.
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, _wait_for_the_command)
    holder = psutil.Process(int(parent)) if psutil.pid_exists(int(parent)) else None
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, close_fds=False)  # the locks it inherited go with it
    deadline = float("inf")
    while True:
        try:
            code = process.wait(EVERY)
            return 128 - code if code < 0 else code
        except subprocess.TimeoutExpired:
            pass
        if deadline == float("inf") and (holder is None or not holder.is_running()):
            sys.stderr.write("the process that this job was started by is gone: the job is told to save and end\n")
            deadline = time.monotonic() + GRACE
            process.send_signal(signal.SIGTERM)
        if time.monotonic() > deadline:
            process.kill()


def _wait_for_the_command(_signum: int, _frame: Any) -> None:
    return


if __name__ == "__main__":
    sys.stdout.flush()
    os._exit(main(sys.argv[1:]))
