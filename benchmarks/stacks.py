"""Ending processes that take too long, so that each says first where it was: used by scaling.py and two_ranks.py.

Python prints the stacks of all its threads on SIGABRT where PYTHONFAULTHANDLER is set, also while it waits inside a library.
"""

from __future__ import annotations

import contextlib
import re
import resource
import signal
import subprocess
import time
from typing import Any

import psutil

SAYING = 5.0
"""Seconds that a process has to print its stacks and end."""
ENVIRONMENT = {"PYTHONFAULTHANDLER": "1", "ELMAN_PHASES": "1"}
"""For the processes that are started: stacks, and what each rank has come to."""
PHASE = re.compile(r"elman: rank (\d+): ([\w ]+ after [\d.]+ s)")
"""What `elman_core.training.ranks.launch.reached` says; ranks may write into each other's lines."""


def kill_tree(process: subprocess.Popen[Any]) -> None:
    """Kill it and all that it started: ranks that wait inside NCCL for each other hear nothing else, and torchrun gives each a
    session of its own."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for one in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()


def end_with_stacks(process: subprocess.Popen[Any]) -> None:
    """Have those at the ends of the tree print their stacks, one after the other, then kill all of it.

    Who started them is stopped meanwhile: torchrun ends all ranks when one of them does.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        above = {parent for one in family for parent in _parents(one)}
        for one in family:
            if one in above:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.suspend()
        for one in family:
            if one not in above:
                _abort(one)
    kill_tree(process)


def no_core_files() -> None:
    """A process that aborts would write all of its memory."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def where(said: str) -> str:
    """In a line, from what ranks have written: how far each came, and what each waited in."""
    phases: dict[str, str] = {}
    for rank, phase in PHASE.findall(said):
        phases[rank] = phase
    found = [f"rank {rank}: {phase}" for rank, phase in sorted(phases.items())]
    return "; ".join([*found, *dict.fromkeys(innermost(said))])


def innermost(said: str, frames: int = 3) -> list[str]:
    """Of every stack of a main thread: the innermost functions, as `in all_reduce (distributed_c10d.py:3252) < mean`."""
    stacks = []
    for block in re.split(r"^(?=Fatal Python error|Timeout )", said, flags=re.M)[1:]:
        threads = re.split(r"^(?=(?:Current thread|Thread) 0x)", block, flags=re.M)[1:]
        calls = re.findall(r'^  File "([^"]+)", line (\d+) in (\S+)', threads[-1] if threads else "", flags=re.M)
        if calls:
            file, line, function = calls[0]
            outer = "".join(f" < {name}" for _, _, name in calls[1:frames])
            stacks.append(f"in {function} ({file.rpartition('/')[2]}:{line}){outer}")
    return stacks


def _parents(one: psutil.Process) -> list[psutil.Process]:
    try:
        return one.parents()
    except psutil.NoSuchProcess:
        return []


def _abort(one: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        one.send_signal(signal.SIGABRT)
        until = time.monotonic() + SAYING
        while one.status() != psutil.STATUS_ZOMBIE and time.monotonic() < until:
            time.sleep(0.02)
