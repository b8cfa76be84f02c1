"""Optional libraries with kernels: their functions, or one line that says why they are unavailable."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeVar, cast

import torch

from elman_core.kernels import KernelError

Found = TypeVar("Found")
Called = TypeVar("Called", bound=Callable[..., Any])


def find(module: str, called: str, install: str, load: Callable[[], Found]) -> Found | str:
    """The result of `load()`, or the reason why there is none.

    Args:
        module: that must be importable. called: the library's name in messages. install: the command that installs it.
        load: imports the library. Any exception counts as a reason, because such imports look for drivers and compilers, which
            can fail in many ways.
    """
    if importlib.util.find_spec(module) is None:
        return f"{called} is not installed: {install}"
    try:
        return load()
    except Exception as error:
        first_line = next(iter(str(error).splitlines()), "no message")
        return f"{called} cannot be imported ({type(error).__name__}: {first_line}): {install}"


def or_raise(found: Found | str) -> Found:
    """The result of `find`; a reason is raised as `KernelError`."""
    if isinstance(found, str):
        raise KernelError(found)
    return found


def never_compiled(function: Called) -> Called:
    """As `torch.compiler.disable`, without importing torch._dynamo where nothing is compiled."""
    disabled = cache(lambda: torch.compiler.disable(function))

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (disabled() if "torch._dynamo" in sys.modules else function)(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # the compiler breaks its graph at the call
    return cast(Called, call)
