"""What kernels of every family share: `ELMAN_KERNELS`, operators of `torch.library`, autocast, transforms.

`ELMAN_KERNELS` says what happens on a GPU. auto (the default): use the kernel; without one, run plain PyTorch after one loud
warning that says why and what to type. off: run plain PyTorch and compile nothing. require: use the kernel or raise an error;
benchmarks and kernel tests always run so.

Under forward-mode derivatives and torch.func, which the operators of kernels do not know (an operator drops a tangent without a
word, and stops under `torch.func.grad`), "auto" takes plain PyTorch, and whoever names a kernel is told.
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
    """float64 if any of these tensors or dtypes is, else float32: the dtype of states and of computation in references."""
    for x in of:
        if (x.dtype if isinstance(x, Tensor) else x) == torch.float64:
            return torch.float64
    return torch.float32


def mode() -> Mode:
    """The value of ELMAN_KERNELS.

    Raises:
        ConfigError: it is something else than auto, off or require.
    """
    value = os.environ.get("ELMAN_KERNELS", "auto")
    if value not in _MODES:
        raise ConfigError(f"ELMAN_KERNELS must be auto, off or require, not {value!r}")
    return cast(Mode, value)


def constant_when_compiled(function: Called) -> Called:
    """As `torch.compiler.assume_constant_result`, which imports torch._dynamo: that takes as long as torch itself."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def warn_of_packed_rows(name: str, like: Tensor) -> None:
    """Say once for each kernel that no kernel of a GPU takes packed rows yet; ELMAN_KERNELS=require makes it an error."""
    if like.is_cuda and not torch.compiler.is_compiling():
        load_or_warn(f"packed rows of {name}", _no_packed_rows)


def _no_packed_rows() -> None:
    raise KernelError("no kernel supports packed rows yet: pad the rows and pass attention_mask")


def load_or_warn(name: str, load: Callable[[], Loaded]) -> Loaded | None:
    """What `load()` returns, or None where plain PyTorch is to run instead.

    Args:
        name: of the kernel; each reason is said once in a process.
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
    """Register `elman::NAME`, which FakeTensor, `torch.compile` and CUDA graphs then know.

    Args:
        schema: "NAME(Tensor x, …) -> Tensor", as of `torch.library`. run: for tensors on any device. fake: for FakeTensors.
        save, differentiate: what the backward needs, and the backward, as of `torch.library.register_autograd`. A derivative
            that is itself to be differentiated is refused.
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
    """That many results, as written in a schema."""
    return f"({', '.join(['Tensor'] * count)})"


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """A context in which autocast is off for the device of x."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if has_autocast(kind) else nullcontext()


def autocast_dtype(weight: Tensor) -> torch.dtype:
    """The dtype in which a product with `weight` is computed: autocast's where that is on for the device, else its own."""
    kind = weight.device.type
    if weight.dtype != torch.float64 and has_autocast(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return weight.dtype


@constant_when_compiled  # `torch.compile` cannot trace the question before torch 2.12
def has_autocast(kind: str) -> bool:
    """Whether devices of this kind have autocast."""
    return torch.amp.is_autocast_available(kind)


def transformed() -> bool:
    """Whether derivatives are being taken otherwise than by `backward`: torch.func.grad, jvp and what is made of them, or
    `torch.autograd.forward_ad`. Not under vmap alone, of which an operator is a loop."""
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
    """Raise NotImplementedError if a derivative would itself be differentiated: a kernel's backward does not support it."""
    if torch.is_grad_enabled():
        raise NotImplementedError(
            f"{name} has no second derivative (create_graph=True); recurrences have it with backend='reference'"
        )


def refuse_transforms(name: str, otherwise: str) -> None:
    """Raise if a kernel was chosen by name and `transformed` is true.

    Raises:
        NotImplementedError: names the kernel and what to take instead.
    """
    if transformed():
        raise NotImplementedError(
            f"{name}: torch.func and forward-mode derivatives exist only with {otherwise}; backward() exists with all"
        )
