"""Compiled modules, opened and called through one small extension of Python (`bind/launch.cpp` of `elman_csrc`).

The extension checks every tensor of a call (dtype, device, sizes, layout) and says in one line what does not fit. It is
compiled once for a Python and a machine, at the first use of any compiled kernel; the modules themselves know no Python.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elman_core.registry.errors import KernelError

from . import build
from .build import Extension

_HERE = nullcontext()
ALIGNMENT = 16  # bytes: the widest load of a kernel


def extension() -> Extension:
    """What `build` compiles of the launcher, for the host."""
    return build.shipped("elman_launch", "launch.cpp", python=True)


@cache
def open_module(path: Path, family: str) -> Any:
    """A compiled module, with `call(**arguments)`, whose `run(function)` launches, `ask(function, *numbers)` and `info()`.

    Args:
        family: of the tables in launch.cpp.

    Raises:
        KernelError: it does not load, was made from other sources than this Python, or the launcher cannot be built. So do
            its methods, of what does not fit and of launches that fail.
    """
    native: Any = build.load(extension())
    native.raises(KernelError)
    return native.Module(str(path), family, f"kernel {path.name.partition('-')[0]}")


def readable(x: Tensor) -> Tensor:
    """x itself where a kernel can read it as it lies (adjacent elements in rows that start aligned), else a contiguous copy."""
    if x.is_contiguous() or x.data_ptr() % ALIGNMENT or x.stride(-1) != 1:
        return whole(x)
    return whole(x) if any(step * x.element_size() % ALIGNMENT for step in x.stride()[:-1]) else x


def whole(x: Tensor) -> Tensor:
    """x itself where it is contiguous and aligned, else a copy."""
    if x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def on(x: Tensor) -> AbstractContextManager[Any]:
    """A context in which the device of x is the current one."""
    index = x.get_device()
    return _HERE if index < 0 or index == torch.cuda.current_device() else torch.cuda.device(index)


def stream(x: Tensor) -> int:
    """The current stream of the device of x; 0 on a CPU."""
    return torch._C._cuda_getCurrentRawStream(x.get_device()) if x.is_cuda else 0
