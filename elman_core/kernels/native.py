"""Compiled modules through ctypes: what those of every family share."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

from elman_core.registry.errors import KernelError


@cache
def open_module(path: Path, family: str, call: type[ctypes.Structure]) -> Any:
    """The compiled module, if it means the same structure by a call as Python does.

    Args:
        family: as in its functions, `elman_FAMILY_call_bytes`.

    Raises:
        KernelError: it does not load, or was made from other sources than this Python.
    """
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelError(f"kernel {path.name} does not load: {error}; delete {path} to build it again") from error
    size = getattr(library, f"elman_{family}_call_bytes")
    if size() != ctypes.sizeof(call):
        raise KernelError(f"kernel {path.name} was made from other sources than this elman-core: update elman-csrc")
    return library
