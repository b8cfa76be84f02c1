"""CUDA C++ skeletons for recurrent cells, as headers. Holds no compiled code."""

from __future__ import annotations

from pathlib import Path

__version__ = "0.1.0"


def get_include() -> Path:
    """The folder to pass to the compiler with -I: headers are included as <elman/...>."""
    return Path(__file__).parent / "include"


def get_emulated() -> Path:
    """With this folder in front of `get_include()`, g++ compiles the sources of GPUs: every thread is a fiber."""
    return Path(__file__).parent / "emulated"


def get_bindings() -> Path:
    """The folder with the bindings (one for each skeleton) that are compiled together with a cell header."""
    return Path(__file__).parent / "bind"
