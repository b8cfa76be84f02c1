"""The GPUs of this machine: which this user may take, and whether one is free.

`Nvml` is all that the scheduler knows of a driver: NVIDIA's management library.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml

from elman_core.extension import ConfigError, ElmanError

MEMORY_FREE = 400 * 2**20
"""Bytes in use on a free GPU, at most: less than the smallest CUDA context takes."""
UTILISATION_FREE = 5
"""Utilisation of a free GPU in per cent, at most."""


class GpuLostError(ElmanError, RuntimeError):
    """A GPU that has left the bus, or must be reset before it computes again."""


@dataclass(frozen=True)
class Gpu:
    """A GPU of this machine: its number as nvidia-smi shows it, UUID, name, memory in bytes."""

    index: int
    uuid: str
    name: str
    memory: int


@dataclass(frozen=True)
class Look:
    """A GPU's present state: bytes in use (without a display's), utilisation in per cent or None, compute processes."""

    memory: int
    utilisation: int | None
    pids: frozenset[int]


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
        found: all GPUs of the machine. gpus: "auto", "none", or indices and UUIDs for `parse`. avoid: GPUs to leave out.
        visible: CUDA_VISIBLE_DEVICES, or None if unset. Its numbers are those of nvidia-smi.

    Raises:
        ConfigError: a GPU does not exist, or CUDA_VISIBLE_DEVICES hides it.
    """
    if gpus == "none":
        return []
    seen = list(found) if visible is None else _visible(found, visible)
    left_out = {gpu.uuid for gpu in parse(avoid, found, "--avoid")} if avoid else set()
    wanted = seen if gpus == "auto" else parse(gpus, found, "--gpus")
    for gpu in wanted:
        if gpu not in seen:
            raise ConfigError(f"--gpus names GPU {gpu.index}, which CUDA_VISIBLE_DEVICES={visible} hides")
    return [gpu for gpu in wanted if gpu.uuid not in left_out]


def parse(text: str, found: Sequence[Gpu], flag: str) -> list[Gpu]:
    """GPUs from "0,2-5" or from UUIDs or their beginnings, in this order, each once. Raises `ConfigError`."""
    by_index = {gpu.index: gpu for gpu in found}
    have = f"GPUs here: {_listed(found)}"
    chosen: list[Gpu] = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        if span := re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part):
            first, last = int(span[1]), int(span[2] or span[1])
            missing: int | str | None = next((i for i in range(first, last + 1) if i not in by_index), None)
            if last < first:
                missing = part
            if missing is not None:
                raise ConfigError(f"{flag} {text}: there is no GPU {missing}. {have}")
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
    """The GPUs that CUDA sees: it stops at the first entry that names none."""
    chosen: list[Gpu] = []
    for part in (p.strip() for p in text.split(",")):
        is_range = "-" in part and part[0].isdigit()
        try:
            hits = [] if is_range else parse(part, found, "CUDA_VISIBLE_DEVICES")
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


class Nvml:
    """Questions to the driver of this machine's NVIDIA GPUs. `library`: pynvml, or None without a driver."""

    def __init__(self, library: Any) -> None:
        self._nvml = library

    def gpus(self) -> list[Gpu]:
        """Every GPU of this machine, by index; none without a driver."""
        n = self._nvml
        found = []
        for index in range(n.nvmlDeviceGetCount() if n else 0):
            try:
                handle = n.nvmlDeviceGetHandleByIndex(index)
                uuid, name = n.nvmlDeviceGetUUID(handle), n.nvmlDeviceGetName(handle)
                found.append(Gpu(index, uuid, name, int(n.nvmlDeviceGetMemoryInfo(handle).total)))
            except n.NVMLError as error:  # a broken GPU does not hide the others
                if error.value not in (n.NVML_ERROR_GPU_IS_LOST, n.NVML_ERROR_RESET_REQUIRED, n.NVML_ERROR_UNKNOWN):
                    raise
        return found

    def look(self, uuid: str) -> Look:
        """The state of a GPU. Raises `GpuLostError`."""
        n, handle = self._nvml, self._handle(uuid)
        try:
            pids = {p.pid for p in n.nvmlDeviceGetComputeRunningProcesses(handle)}
            display = self._ask(n.nvmlDeviceGetGraphicsRunningProcesses, handle) or ()
            shown = sum(p.usedGpuMemory or 0 for p in display if p.pid not in pids)
            memory = self._ask(n.nvmlDeviceGetMemoryInfo, handle, n.nvmlMemory_v2)  # without what the driver reserves
            memory = memory or n.nvmlDeviceGetMemoryInfo(handle)
            use = self._ask(n.nvmlDeviceGetUtilizationRates, handle)
        except n.NVMLError as error:
            raise GpuLostError(f"the driver does not describe GPU {uuid}: {error}") from error
        return Look(max(0, int(memory.used) - shown), None if use is None else int(use.gpu), frozenset(pids))

    def strangers(self, look: Look, own: Collection[int]) -> list[str]:
        """The processes in `look` that are not in `own`, in words: "pid 4711 (python)".

        If none of `own` is there, it has not begun, or a container's process numbers are not the driver's: nobody can be told
        apart from the job, and nobody is named.
        """
        if own and look.pids.isdisjoint(own):
            return []
        others = [_named(pid) for pid in sorted(look.pids - set(own))]
        # NVIDIA's MPS server runs what others launch, and nothing else.
        return [other for other in others if "(nvidia-cuda-mps" not in other]

    def _handle(self, uuid: str) -> Any:
        try:
            return self._nvml.nvmlDeviceGetHandleByUUID(uuid)
        except self._nvml.NVMLError as error:
            raise GpuLostError(f"GPU {uuid} is lost ({error}): it may need a reset or a reboot") from error

    def _ask(self, function: Any, *arguments: Any) -> Any:
        """The answer, or None where this GPU or driver gives none, or not to this user."""
        n = self._nvml
        try:
            return function(*arguments)
        except n.NVMLError as error:
            if error.value in (
                n.NVML_ERROR_NOT_SUPPORTED,
                n.NVML_ERROR_NO_PERMISSION,
                n.NVML_ERROR_FUNCTION_NOT_FOUND,
                n.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
            ):
                return None
            raise


@functools.cache
def monitor() -> Nvml:
    """The monitor of this machine. Raises `ConfigError` if its driver does not answer."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if error.value in (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED):
            return Nvml(None)
        raise ConfigError(f"NVIDIA's driver does not answer: {error}; run nvidia-smi to see why") from error
    return Nvml(pynvml)


def _named(pid: int) -> str:
    try:
        return f"pid {pid} ({Path(f'/proc/{pid}/comm').read_bytes().decode(errors='replace').strip()})"
    except OSError:
        return f"pid {pid}"
