"""Small jobs, GPUs that are folders, and a scheduler in a process of its own that can be killed.

As a script: `scheduler_helpers.py FOLDER FAKE_GPUS ID=SHELL...` runs the jobs to their end.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pytest
from elman_bench.jobs.gpus import busy, choose, monitor
from elman_bench.jobs.job import Job, State, read_state
from elman_bench.jobs.local import LocalExecutor
from elman_bench.jobs.scheduler import Scheduler
from elman_bench.jobs.slots import CpuSlots, GpuSlots
from fake_gpus import USE_GPU, FakeMonitor

__all__ = ["USE_GPU"]


def alone() -> None:
    """Skips a test that needs the GPUs that this process sees to itself where somebody uses one."""
    seen = choose(monitor().gpus(), "auto", "", os.environ.get("CUDA_VISIBLE_DEVICES"))
    if used := [why for gpu in seen if (why := busy(monitor().look(gpu.uuid), ()))]:
        pytest.skip(f"needs the GPUs to itself, and one has {used[0]}: run it alone")


class Recorder:
    """An observer that keeps what it is told, and may act on it."""

    def __init__(self, act: Callable[[str], None] | None = None) -> None:
        self.events: list[str] = []
        self.act = act

    def event(self, text: str) -> None:
        self.events.append(text)
        if self.act:
            self.act(text)

    def tick(self, states: list[State]) -> None:
        return

    def text(self) -> str:
        return "\n".join(self.events)


def shell_job(folder: Path, id: str, shell: str, **changes) -> Job:
    values = {
        "id": id,
        "command": ("sh", "-c", shell),
        "run": None,
        "log": folder / "logs" / f"{id}.log",
        "state": folder / "jobs" / f"{id}.json",
        "env": {"ID": id},
    }
    values["env"] = {**values["env"], **changes.pop("env", {})}
    return Job(**{**values, **changes})


def gpu_executor(monitor: FakeMonitor) -> LocalExecutor:
    return LocalExecutor(GpuSlots(monitor.gpus(), monitor, monitor.root.parent / "locks"), monitor)


def cpu_executor(count: int = 2) -> LocalExecutor:
    return LocalExecutor(CpuSlots(count))


def schedule(jobs, executor, recorder=None, **options) -> tuple[dict[str, str], Recorder]:
    """Run jobs; the status of each, and what was said."""
    recorder = recorder or Recorder()
    states = Scheduler(jobs, executor, recorder, every=0.02, **options).run()
    return {state.id: state.status for state in states}, recorder


def state(job: Job) -> State:
    return read_state(job.state, job.id)


def scheduler_process(folder: Path, monitor: FakeMonitor, jobs: dict[str, str]) -> subprocess.Popen:
    """A scheduler of its own on the same fake GPUs."""
    words = [f"{id}={shell}" for id, shell in jobs.items()]
    command = [sys.executable, str(Path(__file__)), str(folder), str(monitor.root), *words]
    environment = {**os.environ, "FAKE_GPUS": str(monitor.root)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


if __name__ == "__main__":
    folder, root = Path(sys.argv[1]), Path(sys.argv[2])
    todo = [shell_job(folder, *word.split("=", 1)) for word in sys.argv[3:]]
    found, said = schedule(todo, gpu_executor(FakeMonitor(root)))
    sys.stdout.write(said.text() + "\n")
    sys.exit(0 if set(found.values()) == {"ok"} else 1)
