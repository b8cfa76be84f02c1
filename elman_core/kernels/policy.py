"""`ELMAN_KERNELS`: what happens on a GPU when a kernel is there, is missing or cannot be built.

auto (the default): use it; if it cannot be had, run plain PyTorch after one loud warning that says why and what to type.
off: plain PyTorch, nothing is compiled. require: a kernel or an error; benchmarks and kernel tests always run so.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Literal, TypeVar, cast

import torch
from torch import Tensor

from elman_core.registry.errors import ConfigError, KernelError

Mode = Literal["auto", "off", "require"]
Loaded = TypeVar("Loaded")
_MODES = ("auto", "off", "require")
_log = logging.getLogger("elman")
_warned: set[str] = set()


def mode() -> Mode:
    """The value of ELMAN_KERNELS.

    Raises:
        ConfigError: it is something else than auto, off or require.
    """
    value = os.environ.get("ELMAN_KERNELS", "auto")
    if value not in _MODES:
        raise ConfigError(f"ELMAN_KERNELS must be auto, off or require, not {value!r}")
    return cast(Mode, value)


def warn_of_packed_rows(name: str, like: Tensor) -> None:
    """Say once for each kernel that no kernel of a GPU takes packed rows yet; ELMAN_KERNELS=require makes it an error."""
    if like.is_cuda and not torch.compiler.is_compiling():
        load_or_warn(f"packed rows of {name}", _no_packed_rows)


def _no_packed_rows() -> None:
    raise KernelError("no kernel takes starts of documents yet; pad the rows and give attention_mask")


def load_or_warn(name: str, load: Callable[[], Loaded]) -> Loaded | None:
    """What `load()` returns, or None where plain PyTorch is to run instead.

    Args:
        name: of the kernel; each name warns once in a process.
        load: raises `KernelError` if the kernel cannot be had.

    Raises:
        KernelError: from `load`, when ELMAN_KERNELS=require.
    """
    chosen = mode()
    if chosen == "off":
        return None
    try:
        return load()
    except KernelError as error:
        if chosen == "require":
            raise
        if name not in _warned:
            _warned.add(name)
            _log.warning(
                "elman: NO KERNEL for %s, running plain PyTorch, many times slower: %s "
                "(ELMAN_KERNELS=require makes this an error, ELMAN_KERNELS=off silences it)",
                name,
                error,
            )
        return None
