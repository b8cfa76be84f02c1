"""Clocks between two issues of the instructions that the matrix-state kernels are made of, on one scheduler of a GPU."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from pathlib import Path

import torch

from elman_core.kernels import toolchain

NAMES = ("mufu.tanh", "mma tf32 k8", "mma bf16 k16", "mma bf16 k8", "movmatrix", "shfl", "lds.32", "lds.64", "lds.128")


def instruction_rates() -> dict[str, dict[str, float]]:
    """For each of NAMES, with 1, 2 and 4 warps on each of the four schedulers."""
    major, minor = torch.cuda.get_device_capability()
    arch = f"{major}{minor}{'a' if major >= 9 else ''}"
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "rates.so"
        command = [str(toolchain.find_nvcc()), "-O3", "-std=c++17", "-shared", "-Xcompiler=-fPIC"]
        command += [f"-gencode=arch=compute_{arch},code=sm_{arch}", str(Path(__file__).with_suffix(".cu"))]
        subprocess.run([*command, "-o", str(made)], check=True)
        library = ctypes.CDLL(str(made))
    library.elman_rate.restype = ctypes.c_double
    return {
        name: {str(warps): round(library.elman_rate(i, warps), 2) for warps in (1, 2, 4)}
        for i, name in enumerate(NAMES)
    }
