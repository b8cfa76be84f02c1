"""GPUs that are names: a process is on one if it was started to see it. So real trainings on a CPU can be scheduled on them.

As a script it is `elman` on such GPUs: `seen_gpus.py COUNT bench ...`.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from elman_core.experiments.jobs.gpus import Gpu, Look


class SeenMonitor:
    """`Monitor` of `count` GPUs. The processes on one are those that train, or hold it, with it in CUDA_VISIBLE_DEVICES."""

    def __init__(self, count: int) -> None:
        self.count = count

    def gpus(self):
        return [Gpu(i, f"GPU-{i:04d}", "Seen", 80 * 2**30) for i in range(self.count)]

    def look(self, uuid):
        return Look(0, 0, frozenset(pid for pid in _pids() if _is_on(pid, uuid)))

    def strangers(self, look, own):
        return [f"pid {pid} (python)" for pid in sorted(look.pids - set(own))]


def _pids():
    return [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit()]


def _is_on(pid, uuid):
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    computes = b"SEEN_HOLD" in words or (words[1:3] == [b"-m", b"elman_core"])
    return computes and f"CUDA_VISIBLE_DEVICES={uuid}".encode() in environment


if __name__ == "__main__":
    from elman_core.cli import main
    from elman_core.experiments.jobs import gpus

    os.environ["ELMAN_KERNELS"] = "auto"
    driver = SeenMonitor(int(sys.argv[1]))
    gpus.monitor = lambda: driver
    sys.exit(main(sys.argv[2:]))
