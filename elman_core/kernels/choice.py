"""The one chooser of back ends: whether "auto" runs a kernel that is compiled for this GPU, for every family of kernels.

A problem (a batch size and width, say) is decided once in a process: its module is compiled and loaded, and verified unless a
stamp says that it was. Whatever fails on the way leaves plain PyTorch (`runtime.load_or_warn`), but a wrong kernel raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from elman_core.registry.errors import ConfigError, KernelError

from .first_use import ensure_verified
from .runtime import (
    constant_when_compiled,
    load_or_warn,
    mode,
    refuse_transforms,
    transformed,
    warn_of_packed_rows,
)
from .spec import Backend, Case, KernelSpec

Problem = tuple[Any, ...]


class Compiled(Protocol):
    """The interface of a GPU kernel. `problem`: plain values that, with the dtype, identify modules and cases."""

    @property
    def name(self) -> str: ...

    def prepare(self, dtype: torch.dtype, *problem: Any) -> str | None:
        """Compile and load what the current device needs; the launch plan in words, None where plain PyTorch is as good.

        Raises:
            KernelError: not supported, or it cannot be built.
        """

    def cases(self, dtype: torch.dtype, *problem: Any) -> Sequence[Case]:
        """The cases that verify this problem at its first use."""

    def spec(self) -> KernelSpec: ...


_kernels: dict[str, Compiled] = {}
_decided: dict[Problem, bool] = {}


def register(kernel: Compiled) -> None:
    """Let `runs` find a kernel by its name."""
    _kernels[kernel.name] = kernel


def choose(
    name: str,
    asked: Backend,
    like: Tensor,
    problem: Callable[[], Iterable[Any]],
    plain: Backend = "torch",
    starts: Tensor | None = None,
) -> Backend:
    """The back end that runs a call of the kernel of that name.

    Args:
        like: the input. problem: of `runs`; asked for on a GPU alone, since a compiled function is compiled anew for others.
        plain: what "auto" takes without a kernel. starts: those of documents, where the kernels do not take them.

    Raises:
        ConfigError: there is no such back end.
        KernelError: the one that was named cannot run this; or as `runs`.
        NotImplementedError: the one that was named, under torch.func.
    """
    if asked == "auto":
        if transformed():
            return "reference"
        if starts is not None:
            warn_of_packed_rows(name, like)
            return plain
        return "cuda" if like.is_cuda and runs(name, like, *problem()) else plain
    if asked not in (plain, "cuda", "host", "reference"):
        names = ("auto", *(("torch",) if plain == "torch" else ()), "cuda", "host")
        raise ConfigError(f"{name}: backend must be {', '.join(names)} or reference, not {asked!r}")
    if asked != "reference":
        refuse_transforms(name, "backend='auto' or 'reference'")
    if asked in ("cuda", "host"):
        if not (like.is_cpu if asked == "host" else like.is_cuda):
            raise KernelError(f"{name}: backend {asked!r} cannot run on tensors on {like.device}")
        if starts is not None:
            raise KernelError(f"{name}: backend {asked!r} takes no starts of documents; use backend={plain!r}")
    return asked


def runs(name: str, like: Tensor, *problem: Any) -> bool:
    """Whether the kernel of that name runs a problem on the device of `like`, in its dtype.

    Raises:
        KernelError: the kernel is wrong; with ELMAN_KERNELS=require, it cannot be had; or a CUDA graph is being captured
            before the first use.
    """
    return _decide(name, like.device.index, like.dtype, mode(), *problem)


@constant_when_compiled
def _decide(name: str, index: int | None, dtype: torch.dtype, chosen: str, *problem: Any) -> bool:
    """`torch.compile` evaluates this while it traces, and takes only plain values as arguments, one by one."""
    key = (name, index, dtype, chosen, *problem)
    if key not in _decided:
        _decided[key] = chosen != "off" and _prepare(_kernels[name], index, dtype, problem)
    return _decided[key]


def _prepare(kernel: Compiled, index: int | None, dtype: torch.dtype, problem: Problem) -> bool:
    with torch.cuda.device(-1 if index is None else index):
        plan = load_or_warn(kernel.name, lambda: kernel.prepare(dtype, *problem))
        if plan is not None:
            ensure_verified(kernel.spec(), kernel.cases(dtype, *problem), plan)
    return plan is not None


def in_words(name: str, device: torch.device | str, plain: str, fits: Callable[..., bool]) -> str:
    """What "auto" runs; compiles nothing, so before the first use it is what will be tried.

    Args:
        plain: the back end that runs without a kernel. fits: `fits(*problem)`, whether a decided problem is among those meant.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return plain
    if mode() == "off":
        return f"{plain} (ELMAN_KERNELS=off)"
    index = torch.cuda.current_device() if device.index is None else device.index
    here = {key: found for key, found in _decided.items() if key[:2] == (name, index) and fits(*key[4:])}
    return (
        " and ".join(sorted({"cuda" if found else plain for found in here.values()}))
        or "cuda, compiled at its first use"
    )
