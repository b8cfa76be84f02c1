"""What kernels of every family share: `ELMAN_KERNELS`, operators of `torch.library`, autocast, transforms.

`ELMAN_KERNELS` decides what runs on a GPU. auto (the default): the kernel; without one, plain PyTorch after one loud warning
that says why and what to type. off: plain PyTorch; nothing is compiled. require: the kernel, or an error; benchmarks and kernel
tests always use it.

The operators of kernels do not support forward-mode derivatives and torch.func: an operator drops a tangent silently, and fails
under `torch.func.grad`. There, "auto" runs plain PyTorch, and naming a kernel is an error.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import Library, register_autograd, register_fake

from elman_core.registry.errors import ConfigError, KernelError

Mode = Literal["auto", "off", "require"]
Loaded = TypeVar("Loaded")
Called = TypeVar("Called", bound=Callable[..., Any])
_MODES = ("auto", "off", "require")
DTYPE_CODES = {torch.float64: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
"""As in elman/dtype.h: what tensors may be stored in."""
_library = Library("elman", "FRAGMENT")
_log = logging.getLogger("elman")
_warned: set[tuple[str, str]] = set()


def compute_dtype(*of: Tensor | torch.dtype | None) -> torch.dtype:
    """The dtype of states and of computation in references: float64 if any of these tensors or dtypes is, else float32."""
    for x in of:
        if (x.dtype if isinstance(x, Tensor) else x) == torch.float64:
            return torch.float64
    return torch.float32


def mode() -> Mode:
    """The value of ELMAN_KERNELS.

    Raises:
        ConfigError: it is none of auto, off and require.
    """
    value = os.environ.get("ELMAN_KERNELS", "auto")
    if value not in _MODES:
        raise ConfigError(f"ELMAN_KERNELS must be auto, off or require, not {value!r}")
    return cast(Mode, value)


def constant_when_compiled(function: Called) -> Called:
    """As `torch.compiler.assume_constant_result`, without its import of torch._dynamo, which takes as long as torch itself."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def warn_of_packed_rows(name: str, like: Tensor) -> None:
    """Warn once for each kernel that GPU kernels do not support packed rows yet; an error with ELMAN_KERNELS=require."""
    if like.is_cuda and not torch.compiler.is_compiling():
        load_or_warn(f"packed rows of {name}", _no_packed_rows)


def _no_packed_rows() -> None:
    raise KernelError("no kernel supports packed rows yet: pad the rows and pass attention_mask")


def load_or_warn(name: str, load: Callable[[], Loaded]) -> Loaded | None:
    """The result of `load()`, or None if plain PyTorch must run instead.

    Args:
        name: of the kernel; a process logs each reason once.
        load: raises `KernelError` if the kernel is unavailable.

    Raises:
        KernelError: from `load`, with ELMAN_KERNELS=require.
    """
    chosen = mode()
    if chosen == "off":
        return None
    try:
        return load()
    except KernelError as error:
        if chosen == "require":
            raise
        if (name, str(error)) not in _warned:
            _warned.add((name, str(error)))
            _log.warning(
                "elman: NO KERNEL for %s, running plain PyTorch, many times slower: %s "
                "(ELMAN_KERNELS=require makes this an error, ELMAN_KERNELS=off silences it)",
                name,
                error,
            )
        return None


def operator(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    save: Callable[..., None] | None = None,
    differentiate: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Register `elman::NAME` for eager calls, FakeTensor, `torch.compile` and CUDA graphs.

    Args:
        schema: "NAME(Tensor x, …) -> Tensor", as in `torch.library`. run: for tensors on any device. fake: for FakeTensors.
        save, differentiate: the context and the backward, as in `torch.library.register_autograd`. Second derivatives are
            refused.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    register_fake(f"elman::{name}", fake, lib=_library)
    if differentiate is not None:

        def once(ctx: Any, *gradients: Any) -> Any:
            refuse_second_derivatives(name)
            return differentiate(ctx, *gradients)

        register_autograd(f"elman::{name}", once, setup_context=save, lib=_library)
    made: Callable[..., Any] = getattr(torch.ops.elman, name).default
    return made


def tensors(count: int) -> str:
    """This many results, as a schema writes them."""
    return f"({', '.join(['Tensor'] * count)})"


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """A context in which autocast is off for the device of x."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if has_autocast(kind) else nullcontext()


def autocast_dtype(weight: Tensor) -> torch.dtype:
    """The dtype of a product with `weight`: that of autocast if it is on for the device, else the weight's."""
    kind = weight.device.type
    if weight.dtype != torch.float64 and has_autocast(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return weight.dtype


@constant_when_compiled  # before torch 2.12, `torch.compile` cannot trace this call
def has_autocast(kind: str) -> bool:
    """Whether devices of this kind have autocast."""
    return torch.amp.is_autocast_available(kind)


def transformed() -> bool:
    """Whether derivatives are taken by other means than `backward`: torch.func.grad, jvp and their relatives, or
    `torch.autograd.forward_ad`. False under vmap alone, which runs an operator in a loop."""
    if torch.compiler.is_compiling():
        return False
    if forward_ad._current_level >= 0:
        return True
    functorch: Any = torch._C._functorch  # type: ignore[attr-defined]
    if not (levels := functorch.get_interpreter_stack()):
        return False
    kinds = (functorch.TransformType.Grad, functorch.TransformType.Jvp)
    return any(level.key() in kinds for level in levels)


def refuse_second_derivatives(name: str) -> None:
    """Raise NotImplementedError if a derivative would itself be differentiated. No kernel's backward supports that."""
    if torch.is_grad_enabled():
        raise NotImplementedError(
            f"{name} has no second derivative (create_graph=True); recurrences have it with backend='reference'"
        )


def refuse_transforms(name: str) -> None:
    """For a kernel that was chosen by name.

    Raises:
        NotImplementedError: `transformed` is true; names the kernel and what to use instead.
    """
    if transformed():
        raise NotImplementedError(
            f"{name}: torch.func and forward-mode derivatives exist only with backend='auto' or 'reference'; backward() "
            "exists with all"
        )
