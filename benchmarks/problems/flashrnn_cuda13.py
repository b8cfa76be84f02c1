"""Measure FlashRNN (1.0.8), with its kernels unchanged, if the toolkit is CUDA 13 or newer.

FlashRNN compiles its kernels for the shape it is called with. Before that, it builds an extension, `gpu_info`, that copies
cudaDeviceProp into a dict, field by field. CUDA 13 removed eight of the fields (clockRate and others), so this no longer
compiles. FlashRNN reads four of the others, to choose the kernels' tiling. `prepare` puts those four, as torch reports them,
where FlashRNN keeps the loaded extension. Tiling, sources, flags and launches stay FlashRNN's own; under CUDA 12 nothing is
done.
"""

from __future__ import annotations

from importlib import import_module, metadata
from types import SimpleNamespace
from typing import Any

import torch


class GPUInfo:
    """Replaces the class of that name in FlashRNN's extension, for the names that FlashRNN reads."""

    def gpu_info(self, device: int) -> dict[str, int]:
        """Threads, 32-bit registers, multiprocessors and bytes, by cudaDeviceProp's names."""
        seen = torch.cuda.get_device_properties(device)
        return {
            "maxThreadsPerBlock": seen.max_threads_per_block,
            "regsPerMultiprocessor": seen.regs_per_multiprocessor,
            "multiProcessorCount": seen.multi_processor_count,
            "sharedMemPerBlockOptin": seen.shared_memory_per_block_optin,
        }


def toolkit() -> Any:
    """The version of the nvcc that FlashRNN finds and compiles with; None if it finds none."""
    return import_module("flashrnn.flashrnn.cuda_init").get_cuda_version()


def prepare() -> bool:
    """Give FlashRNN the properties of the GPU if its own extension does not compile; return whether that was so."""
    found = toolkit()
    if found is None or found.major < 13:
        return False
    import_module("flashrnn.flashrnn.gpu_info.gpu_info")._GPUInfoCUDA.mod = SimpleNamespace(GPUInfo=GPUInfo)
    return True


def why_not(error: Exception) -> str | None:
    """One line for a failed build, None for any other error; the compiler's messages went to the output."""
    first = (str(error).splitlines() or [""])[0]
    if not first.startswith("Error building extension"):
        return None
    return f"FlashRNN {metadata.version('flashrnn')} does not compile with CUDA {toolkit()}: {first}, see the output"
