"""The GPUs as NVIDIA's driver sees them, through its management library (`pip install nvidia-ml-py`)."""

from __future__ import annotations

import functools
import importlib
import os
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

from elman_core.registry.errors import ConfigError

from .gpus import Gpu, GpuLostError, Look

_FIRST_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO of Linux


class Nvml:
    """`Monitor` of this machine's NVIDIA GPUs."""

    def __init__(self, library: Any) -> None:
        self._nvml = library

    def gpus(self) -> list[Gpu]:
        n = self._nvml
        found = []
        for index in range(n.nvmlDeviceGetCount()):
            try:
                handle = n.nvmlDeviceGetHandleByIndex(index)
                uuid, name = _text(n.nvmlDeviceGetUUID(handle)), _text(n.nvmlDeviceGetName(handle))
                found.append(Gpu(index, uuid, name, int(n.nvmlDeviceGetMemoryInfo(handle).total)))
            except n.NVMLError as error:  # a broken GPU does not hide the others
                if not self._is_lost(error):
                    raise
        return found

    def look(self, uuid: str) -> Look:
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
        """In a container, process numbers differ from the driver's, so none of them is known to be the job's. Then one process
        on a job's GPU is taken for the job, and each further process for a stranger.
        """
        others = sorted(look.pids - set(own))
        if own and len(others) == len(look.pids) and not _sees_every_process():
            others = others[1:]
        return [_named(pid) for pid in others]

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

    def _is_lost(self, error: Any) -> bool:
        n = self._nvml
        return error.value in (n.NVML_ERROR_GPU_IS_LOST, n.NVML_ERROR_RESET_REQUIRED, n.NVML_ERROR_UNKNOWN)


class NoGpus:
    """`Monitor` of a machine without a GPU."""

    def gpus(self) -> list[Gpu]:
        return []

    def look(self, uuid: str) -> Look:
        raise GpuLostError(f"GPU {uuid} is not on this machine")

    def strangers(self, look: Look, own: Collection[int]) -> list[str]:
        return []


@functools.cache
def monitor() -> Nvml | NoGpus:
    """The monitor of this machine.

    Raises:
        ConfigError: there is a driver but not its library, so that nothing tells which GPUs are free.
    """
    try:
        library = importlib.import_module("pynvml")
    except ImportError:
        if Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi"):
            raise ConfigError(
                "this machine has NVIDIA GPUs, but the library that tells which are free is missing: pip install nvidia-ml-py"
            ) from None
        return NoGpus()
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        if error.value in (library.NVML_ERROR_LIBRARY_NOT_FOUND, library.NVML_ERROR_DRIVER_NOT_LOADED):
            return NoGpus()
        raise ConfigError(f"NVIDIA's driver does not answer: {error}; run nvidia-smi to see why") from error
    return Nvml(library)


def _sees_every_process() -> bool:
    """Whether process numbers here are the driver's: on Linux, outside of containers."""
    try:
        return os.readlink("/proc/self/ns/pid") == _FIRST_PID_NAMESPACE
    except OSError:
        return False


def _named(pid: int) -> str:
    try:
        return f"pid {pid} ({Path(f'/proc/{pid}/comm').read_text().strip()})"
    except OSError:
        return f"pid {pid}"


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
