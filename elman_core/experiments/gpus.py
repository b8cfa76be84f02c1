"""Which GPUs there are, which of them this user may take, and whether one is free.

`Monitor` is all that the scheduler knows of a driver; `elman_core.experiments.nvml` is the real one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from elman_core.registry.errors import ConfigError, ElmanError

MEMORY_FREE = 400 * 2**20
"""Bytes that a GPU in use by nobody may show as used: less than what the smallest CUDA context takes."""
UTILISATION_FREE = 5
"""Per cent of the last sampling period in which a kernel may have run on it."""


class GpuLostError(ElmanError, RuntimeError):
    """A GPU that has fallen off the bus, or must be reset before it computes again."""


@dataclass(frozen=True)
class Gpu:
    """A GPU of this machine: its number as nvidia-smi shows it, UUID, name, memory in bytes."""

    index: int
    uuid: str
    name: str
    memory: int


@dataclass(frozen=True)
class Look:
    """What a GPU does now: bytes in use (those of a display left out), utilisation in per cent or None, compute processes."""

    memory: int
    utilisation: int | None
    pids: frozenset[int]


class Monitor(Protocol):
    """What is asked of a driver."""

    def gpus(self) -> list[Gpu]:
        """Every GPU of this machine, by index; none without a driver."""

    def look(self, uuid: str) -> Look:
        """What a GPU does now. Raises `GpuLostError`."""

    def strangers(self, look: Look, own: Collection[int]) -> list[str]:
        """The processes in `look` other than `own`, in words: "pid 4711 (python)"."""


def busy(look: Look, strangers: Sequence[str]) -> str:
    """Why a GPU is not free, or an empty string."""
    if strangers:
        return f"used by {', '.join(strangers)}"
    if look.memory > MEMORY_FREE:
        return f"{look.memory / 2**30:.1f} GiB in use"
    if look.utilisation is not None and look.utilisation > UTILISATION_FREE:
        return f"{look.utilisation} % busy"
    return ""


def choose(found: Sequence[Gpu], gpus: str = "auto", avoid: str = "", visible: str | None = None) -> list[Gpu]:
    """The GPUs that may be taken.

    Args:
        found: those of the machine. gpus: "auto", "none", or indices and UUIDs as `parse` reads them. avoid: likewise.
        visible: CUDA_VISIBLE_DEVICES, or None if it is not set. Its numbers are taken in the order of nvidia-smi.

    Raises:
        ConfigError: a GPU that is not there, or that CUDA_VISIBLE_DEVICES hides.
    """
    seen = list(found) if visible is None else _visible(found, visible)
    left_out = {gpu.uuid for gpu in parse(avoid, found, "--avoid")} if avoid else set()
    if gpus == "none":
        return []
    wanted = seen if gpus == "auto" else parse(gpus, found, "--gpus")
    for gpu in wanted:
        if gpu not in seen:
            raise ConfigError(f"--gpus names GPU {gpu.index}, which CUDA_VISIBLE_DEVICES={visible} hides")
    return [gpu for gpu in wanted if gpu.uuid not in left_out]


def parse(text: str, found: Sequence[Gpu], flag: str) -> list[Gpu]:
    """GPUs from "0,2-5" or UUIDs (or their beginnings), in this order, each once.

    Raises:
        ConfigError: not written so, or there is no such GPU.
    """
    by_index = {gpu.index: gpu for gpu in found}
    have = f"GPUs here: {_listed(found)}"
    chosen: list[Gpu] = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        if span := re.fullmatch(r"(\d+)(?:-(\d+))?", part):
            first, last = int(span[1]), int(span[2] or span[1])
            missing = [i for i in range(first, last + 1) if i not in by_index]
            if missing or last < first:
                raise ConfigError(f"{flag} {text}: there is no GPU {missing[0] if missing else part}. {have}")
            chosen += [by_index[i] for i in range(first, last + 1)]
        elif part.lower().startswith("mig-"):
            raise ConfigError(f"{flag} {text}: slices of a GPU (MIG) share its memory bus and are not scheduled")
        else:
            hits = [gpu for gpu in found if gpu.uuid.lower().startswith(part.lower())]
            if len(hits) != 1 or len(part) < 5:
                raise ConfigError(f"{flag} takes auto, none, numbers such as 0,2-5, or UUIDs, not {part!r}. {have}")
            chosen += hits
    return list(dict.fromkeys(chosen))


def _visible(found: Sequence[Gpu], text: str) -> list[Gpu]:
    """What CUDA would see: it stops at the first entry that names no GPU."""
    chosen: list[Gpu] = []
    for part in (p.strip() for p in text.split(",")):
        try:
            hits = parse(part, found, "CUDA_VISIBLE_DEVICES") if "-" not in part or not part[0].isdigit() else []
        except ConfigError:
            if part.lower().startswith("mig-"):
                raise
            hits = []
        if not hits:
            break
        chosen += hits
    return list(dict.fromkeys(chosen))


def _listed(found: Sequence[Gpu]) -> str:
    return ", ".join(f"{gpu.index} {gpu.name}" for gpu in found) or "none"
