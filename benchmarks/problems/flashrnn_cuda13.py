"""Let FlashRNN (1.0.8) be measured where the toolkit is CUDA 13 or newer, its kernels untouched.

FlashRNN compiles its kernels for the shape it is called with. Before, it builds an extension, `gpu_info`, that copies
cudaDeviceProp into a dict, field by field; CUDA 13 removed eight of them (clockRate and others), so this no longer compiles.
Four of the rest are read, to choose the kernels' tiling. `prepare` puts those four, as torch reports them, where FlashRNN keeps
the extension once it is loaded. Tiling, sources, flags and launches stay FlashRNN's own; under CUDA 12 nothing is done.
"""

from __future__ import annotations

from importlib import import_module, metadata
from types import SimpleNamespace
from typing import Any

import torch


class GPUInfo:
    """Answers as the class of that name in FlashRNN's extension does, for the names that FlashRNN reads."""

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
    """The version of the nvcc that FlashRNN compiles with, as FlashRNN finds it; None where it finds none."""
    return import_module("flashrnn.flashrnn.cuda_init").get_cuda_version()


def prepare() -> bool:
    """Give FlashRNN the facts of the GPU, where its own way to them does not compile; whether that was so."""
    found = toolkit()
    if found is None or found.major < 13:
        return False
    import_module("flashrnn.flashrnn.gpu_info.gpu_info")._GPUInfoCUDA.mod = SimpleNamespace(GPUInfo=GPUInfo)
    return True


def why_not(error: Exception) -> str | None:
    """One line for a build that failed, and None for any other error; the compiler's words went to the output."""
    first = (str(error).splitlines() or [""])[0]
    if not first.startswith("Error building extension"):
        return None
    return f"FlashRNN {metadata.version('flashrnn')} does not compile with CUDA {toolkit()}: {first}, see the output"
