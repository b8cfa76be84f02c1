"""Find the compilers and headers. Runs nothing."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sysconfig
from pathlib import Path

import pybind11

from elman_core.registry.errors import KernelError


def find_nvcc() -> Path:
    """nvcc from CUDA_HOME, then PATH, then the toolkit's pip packages. Raises `KernelError`, which says what to install."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        nvcc = Path(home) / "bin" / "nvcc"
        if nvcc.is_file():
            return nvcc
        raise KernelError(f"CUDA_HOME={home} holds no bin/nvcc: correct it, or unset it to search PATH")
    if on_path := shutil.which("nvcc"):
        return Path(on_path)
    for folder in _pip_toolkit():
        if (nvcc := folder / "bin" / "nvcc").is_file():
            return nvcc
    raise KernelError(
        "no CUDA compiler: nvcc is neither under CUDA_HOME nor on PATH nor installed by pip; "
        "type `pip install nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-cuda-cccl`, install the CUDA toolkit, "
        "or point ELMAN_CACHE to a folder made with `elman build --out` elsewhere"
    )


def find_host_compiler() -> Path:
    """The C++17 compiler from CXX, else g++, else c++. Raises `KernelError`, which says what to install."""
    asked = os.environ.get("CXX")
    for name in [asked] if asked else ["g++", "c++"]:
        if found := shutil.which(name):
            return Path(found)
    where = f"CXX={asked} is not an executable" if asked else "neither g++ nor c++ is on PATH"
    raise KernelError(f"no C++ compiler: {where}; type `apt-get install g++`, or set CXX")


def pip_dirs(nvcc: Path, kind: str) -> list[Path]:
    """Folders of headers ("include") or libraries ("lib") that an nvcc installed by pip does not find by itself."""
    folders = _pip_toolkit()
    if not any(nvcc.is_relative_to(folder) for folder in folders):
        return []
    return [folder / kind for folder in folders if (folder / kind).is_dir()]


def python_include_dirs() -> list[Path]:
    """The folders of the headers of this Python and of pybind11. Raises `KernelError` without Python's."""
    python = Path(sysconfig.get_path("include"))
    if not (python / "Python.h").is_file():
        version = sysconfig.get_python_version()
        raise KernelError(f"no Python headers: there is no {python}/Python.h; install python{version}-dev")
    return [python, Path(pybind11.get_include())]


def host_architecture() -> str:
    """The name of this processor's architecture: "x86_64", "arm64"."""
    return platform.machine() or "unknown"


def python_abi() -> str:
    """The suffix of extension modules for this Python version: ".cpython-311-x86_64-linux-gnu.so"."""
    return str(sysconfig.get_config_var("EXT_SUFFIX"))


def _pip_toolkit() -> list[Path]:
    """The folders that the toolkit's pip packages install under "nvidia" in site-packages: cu13, or cuda_nvcc, … of CUDA 12."""
    spec = importlib.util.find_spec("nvidia")
    roots = (spec.submodule_search_locations if spec else None) or []
    return [folder for root in roots for folder in sorted(Path(root).iterdir()) if folder.is_dir()]
