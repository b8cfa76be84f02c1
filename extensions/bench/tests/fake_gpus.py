"""GPUs that are folders: a process is on one if a file there bears its number. For tests of the scheduler alone."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from pathlib import Path

from elman_bench.jobs.gpus import Gpu, GpuLostError, Look

# What a job does on its GPU: be there, alone or say so, and leave. {seconds} is how long.
USE_GPU = (
    'for g in $(echo $CUDA_VISIBLE_DEVICES | tr "," " "); do mkdir "$FAKE_GPUS/$g/job" || echo $g >> "$FAKE_GPUS/collisions"; '
    'touch "$FAKE_GPUS/$g/$$"; done; echo "$ID" >> "$FAKE_GPUS/ran"; sleep {seconds}; '
    'for g in $(echo $CUDA_VISIBLE_DEVICES | tr "," " "); do rm "$FAKE_GPUS/$g/$$"; rmdir "$FAKE_GPUS/$g/job"; done'
)


class FakeMonitor:
    """As `Nvml`, of the folder `root`: one folder a GPU, in it a file for each process and, if there is one, `state.json`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def make(cls, root: Path, count: int) -> FakeMonitor:
        for index in range(count):
            (root / f"GPU-{index:04d}").mkdir(parents=True)
        return cls(root)

    def plant(self, index: int, **state: object) -> None:
        """Change a GPU: memory=bytes, utilisation=per cent, lost=True, pids=[…]."""
        path = self.root / f"GPU-{index:04d}" / "state.json"
        partial = path.with_suffix(".new")
        partial.write_text(json.dumps(state))
        os.replace(partial, path)

    def gpus(self) -> list[Gpu]:
        folders = sorted(p for p in self.root.iterdir() if p.name.startswith("GPU-"))
        return [Gpu(i, p.name, "Fake", 80 * 2**30) for i, p in enumerate(folders)]

    def look(self, uuid: str) -> Look:
        state = self._state(uuid)
        if state.get("lost"):
            raise GpuLostError(f"GPU {uuid} is lost")
        here = [int(p.name) for p in (self.root / uuid).iterdir() if p.name.isdigit()]
        alive = {pid for pid in here if Path(f"/proc/{pid}").exists()}  # the driver forgets the dead
        return Look(state.get("memory", 0), state.get("utilisation", 0), frozenset(alive | set(state.get("pids", []))))

    def strangers(self, look: Look, own: Collection[int]) -> list[str]:
        return [f"pid {pid}" for pid in sorted(look.pids - set(own))]

    def collisions(self) -> str:
        path = self.root / "collisions"
        return path.read_text() if path.exists() else ""

    def ran(self) -> list[str]:
        path = self.root / "ran"
        return path.read_text().split() if path.exists() else []

    def _state(self, uuid: str) -> dict:
        path = self.root / uuid / "state.json"
        return json.loads(path.read_text()) if path.exists() else {}
