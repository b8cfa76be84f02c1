"""What NVIDIA's driver says of the GPUs, through its management library (`pip install nvidia-ml-py`)."""

from __future__ import annotations

import functools
import importlib
import logging
import os
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

from elman_core.registry.errors import ConfigError

from .gpus import Gpu, GpuLostError, Look

log = logging.getLogger("elman_core")

# Xid numbers that the hardware or the driver causes, not a program: memory errors, links, a GPU that left the bus, its
# firmware (NVIDIA, "Xid Errors"). A bad address in a kernel is 13 or 31 and is the program's own.
HARDWARE_XIDS = frozenset({48, 61, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140, 143})
_FIRST_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO of Linux


class Nvml:
    """`Monitor` of this machine's NVIDIA GPUs."""

    def __init__(self, library: Any) -> None:
        self._nvml = library
        self._errors: dict[str, int] = {}  # uncorrectable memory errors counted so far
        self._events: Any = None
        self._xids: dict[str, list[int]] = {}  # seen and not yet asked for

    def gpus(self) -> list[Gpu]:
        n = self._nvml
        found = []
        for index in range(n.nvmlDeviceGetCount()):
            try:
                handle = n.nvmlDeviceGetHandleByIndex(index)
                uuid, name = _text(n.nvmlDeviceGetUUID(handle)), _text(n.nvmlDeviceGetName(handle))
                found.append(Gpu(index, uuid, name, int(n.nvmlDeviceGetMemoryInfo(handle).total)))
            except n.NVMLError as error:  # one that is broken does not hide the others
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

    def faults(self, uuid: str) -> str:
        n = self._nvml
        try:
            handle = self._handle(uuid)
            self._read_xids(uuid, handle)
            count = self._ask(
                n.nvmlDeviceGetTotalEccErrors, handle, n.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, n.NVML_VOLATILE_ECC
            )
        except GpuLostError as error:
            return str(error)
        except n.NVMLError as error:
            if self._is_lost(error):
                return f"GPU {uuid} is lost ({error})"
            log.warning("elman: the driver does not count the errors of GPU %s: %s", uuid, error)
            return ""
        known = self._errors.get(uuid, count or 0)
        self._errors[uuid] = count or 0
        if (count or 0) > known:
            return f"GPU {uuid} counted {count - known} uncorrectable memory errors"
        hardware = sorted(HARDWARE_XIDS.intersection(self._xids.pop(uuid, ())))
        return f"GPU {uuid} reported Xid {', '.join(map(str, hardware))}" if hardware else ""

    def _read_xids(self, uuid: str, handle: Any) -> None:
        """Note what was reported since the last call; the first call begins to listen to a GPU."""
        n = self._nvml
        if self._events is None:
            self._events = n.nvmlEventSetCreate()
        if uuid not in self._errors:
            self._ask(n.nvmlDeviceRegisterEvents, handle, n.nvmlEventTypeXidCriticalError, self._events)
        while True:
            try:
                event = n.nvmlEventSetWait_v2(self._events, 0)
            except n.NVMLError as error:
                if error.value == n.NVML_ERROR_TIMEOUT or error.value == n.NVML_ERROR_NOT_SUPPORTED:
                    return
                raise
            self._xids.setdefault(_text(n.nvmlDeviceGetUUID(event.device)), []).append(int(event.eventData))

    def strangers(self, look: Look, own: Collection[int]) -> list[str]:
        """Where process numbers are not those of the driver, as in a container, nobody can be told apart: then one process
        on a GPU that holds a job is taken for the job's, and more than one for company.
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
        """The answer, or None where this GPU, driver or user gets none."""
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

    def faults(self, uuid: str) -> str:
        return f"GPU {uuid} is not on this machine"

    def strangers(self, look: Look, own: Collection[int]) -> list[str]:
        return []


@functools.cache
def monitor() -> Nvml | NoGpus:
    """The monitor of this machine.

    Raises:
        ConfigError: there is a driver, but not the library that asks it: nobody could say which GPU is free.
    """
    try:
        library = importlib.import_module("pynvml")
    except ImportError:
        if Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi"):
            raise ConfigError(
                "this machine has NVIDIA GPUs, and what tells which are free is not installed: pip install nvidia-ml-py"
            ) from None
        return NoGpus()
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        if error.value in (library.NVML_ERROR_LIBRARY_NOT_FOUND, library.NVML_ERROR_DRIVER_NOT_LOADED):
            return NoGpus()
        raise ConfigError(f"NVIDIA's driver does not answer: {error}; nvidia-smi says more") from error
    return Nvml(library)


def _sees_every_process() -> bool:
    """Whether this process counts processes as the driver does: outside of any container, on Linux."""
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
