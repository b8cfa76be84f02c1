"""g++ with the headers of emulated_gpu/ before CUDA's: GPU sources for the processor, every thread a fiber."""

from __future__ import annotations

import subprocess
from pathlib import Path

from elman_core.kernels import toolchain
from elman_core.kernels.build import Extension

HERE = Path(__file__).parent
LIBRARY = ("-fPIC", "-shared", "-fvisibility=hidden")


def compile_emulated(extension: Extension, source: Path, made: Path, *options: str) -> None:
    """`source`, which is the binding of a CUDA extension or includes it, into `made`.

    Args:
        options: of g++; `LIBRARY` for a module.
    """
    command = [str(toolchain.find_host_compiler()), "-x", "c++", "-std=c++17", "-O1", "-Wno-unknown-pragmas", *options]
    command += [f"-I{folder}" for folder in (HERE / "emulated_gpu", *extension.include, extension.binding.parent)]
    command += [f"-D{name}={value}" for name, value in extension.defines]
    if extension.header is not None:
        command.append(f'-DELMAN_CELL_HEADER="{extension.header}"')
    done = subprocess.run([*command, str(source), "-o", str(made)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
