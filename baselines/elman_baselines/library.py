"""Optional libraries with kernels: their functions, or one line that says why they are unavailable."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, wraps
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor

from elman_core.kernels import KernelError, load_or_warn, transformed

Found = TypeVar("Found")
Called = TypeVar("Called", bound=Callable[..., Any])
_log = logging.getLogger("elman_core")


def never_compiled(function: Called) -> Called:
    """As `torch.compiler.disable`, without importing torch._dynamo where nothing is compiled."""
    disabled = cache(lambda: torch.compiler.disable(function))

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (disabled() if "torch._dynamo" in sys.modules else function)(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # the compiler breaks its graph at the call
    return cast(Called, call)


@dataclass(frozen=True)
class Library(Generic[Found]):
    """An optional library, which is imported at its first use.

    Attributes:
        variants: what it speeds up, in messages. module: that must be importable. called: the library's name in messages.
        install: the command that installs it.
        load: imports the library and returns its functions. Any exception counts as a reason why there are none, because such
            imports look for drivers and compilers, which can fail in many ways.
    """

    variants: str
    module: str
    called: str
    install: str
    load: Callable[[], Found]

    def functions(self) -> Found:
        """The library's functions.

        Raises:
            KernelError: it is not installed or cannot be imported; says what to type.
        """
        if isinstance(self.found, str):
            raise KernelError(self.found)
        return self.found

    @never_compiled
    def chosen(self) -> Found | None:
        """The library's functions, or None under torch.func, which they do not support, or after one line that says why.

        Raises:
            KernelError: there are none, and ELMAN_KERNELS=require.
        """
        return None if transformed(vmap=True) else load_or_warn(self.variants, self.functions)

    @cached_property
    def found(self) -> Found | str:
        """The functions, or the reason why there are none."""
        if importlib.util.find_spec(self.module) is None:
            return f"{self.called} is not installed: {self.install}"
        try:
            return self.load()
        except Exception as error:
            first_line = next(iter(str(error).splitlines()), "no message")
            return f"{self.called} cannot be imported ({type(error).__name__}: {first_line}): {self.install}"


def fla_runs(x_BTD: Tensor) -> bool:
    """Whether fla can run a call: its steps, for one byte, have no backward."""
    return x_BTD.shape[1] > 1 or not torch.is_grad_enabled()


def warn_of_tuning(variants: str) -> None:
    """Say that fla's first steps take long."""
    _log.warning(
        "elman: %s: fla tunes its Triton kernels at the first step of each shape, which can take two minutes without a word "
        "(TRITON_PRINT_AUTOTUNING=1 tells of each)",
        variants,
    )
