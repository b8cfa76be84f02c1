"""Choose the back end of a call, for every family of kernels: does "auto" run a compiled kernel on this GPU or CPU?

A process decides each problem (a batch size and a width, for example) once: it compiles and loads the module, and verifies it
unless a stamp says that this was done. If a step fails, plain PyTorch runs (`runtime.load_or_warn`); a wrong kernel raises.

On a CPU, "auto" runs a kernel where `pays` says so. That does not depend on the batch, nor must the bits of a row.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from elman_core.registry.errors import ConfigError, KernelError, KernelUnavailableError

from . import launch, runtime
from .build import Extension, build_all, find, local_arch
from .spec import Backend, Case, KernelSpec
from .toolchain import find_host_compiler, host_architecture, python_include_dirs
from .verify_cache import ensure_verified

Problem = tuple[Any, ...]


class Compiled(Protocol):
    """The interface of a kernel. `problem`: plain values that, with the dtype, identify modules and cases.

    Attributes:
        cpu: whether there is one for CPUs, too: with the target "cpu" in its spec, and the same `cases`.
    """

    name: str
    cpu: bool = False

    def prepare(self, dtype: torch.dtype, *problem: Any) -> str | None:
        """Compile and load what the current device needs. The launch plan in words, or None if plain PyTorch is as good. Raises
        `KernelError`: the problem is not supported, or its module cannot be built."""

    def cases(self, dtype: torch.dtype, *problem: Any) -> Sequence[Case]:
        """The cases that verify this problem at its first use."""

    def builds(self, arch: str, dtype: torch.dtype, *problem: Any) -> Sequence[Extension]:
        """What this problem may launch on GPUs of an architecture, at any batch size."""
        module = self.spec().module
        return [module("cuda", case) for case in self.cases(dtype, *problem)] if module is not None else []

    def spec(self) -> KernelSpec:
        """What `elman verify` checks of this kernel."""

    def specs(self) -> tuple[KernelSpec, ...]:
        """All that `elman verify` checks: give it as `Variant(kernels=….specs())`."""
        return (self.spec(),)


_kernels: dict[str, Compiled] = {}
_owners: dict[str, str] = {}
_decided: dict[Problem, bool] = {}
_asked: dict[Problem, None] | None = None
_as_if = 0  # steps


def register(kernel: Compiled) -> None:
    """Let `runs` find this kernel by its name. Raises `ConfigError`: another one has it."""
    if kernel.name in _kernels:
        raise ConfigError(
            f"{_owners[kernel.name]} has a kernel of this name ({kernel.name}), too: choose another in {runtime.caller()}"
        )
    _kernels[kernel.name] = kernel
    _owners[kernel.name] = runtime.caller()


def registered(package: str) -> dict[str, str]:
    """The kernels that were made in a package: {name: module}."""
    return {name: module for name, module in _owners.items() if module.partition(".")[0] == package}


@contextlib.contextmanager
def asking(steps: int = 0) -> Iterator[dict[Problem, None]]:
    """Yields the (name, dtype, *problem) of the kernels that would run for what models do inside, where plain PyTorch runs: for
    those on the meta device, kernels of a GPU; for those on a CPU, its own, as if all texts had at least so many steps."""
    global _asked, _as_if
    _asked, _as_if = {}, steps
    try:
        yield _asked
    finally:
        _asked, _as_if = None, 0


def builds(asked: Problem, arch: str) -> Sequence[Extension]:
    """What one of these problems launches on GPUs of an architecture."""
    name, dtype, *problem = asked
    return _kernels[name].builds(arch, dtype, *problem)


def launches(x: Tensor) -> bool:
    """Whether kernels run for x, or, inside `asking`, would run on a GPU."""
    return x.is_cuda or (_asked is not None and x.is_meta)


FEW = 7
"""Rows of the batch of the problem that verifies a kernel of a CPU whose module takes any number."""
SHORTEST = 16
"""Steps from which a kernel of a CPU may run in "auto"."""
_LEAST_WORK = 1 << 18  # steps times elements, likewise


def pays(like: Tensor, steps: int, elements: int) -> bool:
    """Whether a kernel of a CPU runs a recurrence in "auto": of so many steps and elements of the state of a row of the batch.

    Below, plain PyTorch takes less time than compiling and verifying. Compiled by `torch.compile`, it runs, too. Steps count as
    their highest power of two: texts that share it may be padded to the longest without another back end.
    """
    if torch.compiler.is_compiling() or not like.is_cpu or like.dtype not in runtime.CPU_DTYPES:
        return False
    steps = max(steps, _as_if)
    return steps >= SHORTEST and elements << steps.bit_length() - 1 >= _LEAST_WORK


def trains(like: Tensor, steps: int, width: int) -> bool:
    """As `pays`, for a state of so many channels. Its steps are short in plain PyTorch, so that a text alone does not pay."""
    return torch.is_grad_enabled() and pays(like, steps, 4 * width)


def choose(
    name: str,
    asked: Backend,
    like: Tensor,
    problem: Callable[[], Iterable[Any]],
    plain: Backend = "torch",
    cpu: bool = False,
) -> Backend:
    """The back end that runs a call of the kernel of this name: "cuda" for "emulated".

    Args:
        like: the input. problem: makes the problem for `runs`. Called on a GPU only, since it reads sizes, and a compiled
            function is compiled again for each size that it reads.
        plain: what "auto" runs without a kernel. cpu: whether the call `pays` on a CPU.

    Raises:
        ConfigError: there is no such back end.
        KernelError: the named back end cannot run this call; or as `runs`.
        NotImplementedError: a back end was named under torch.func.
    """
    if asked == "auto":
        if runtime.transformed():
            return "reference"
        if cpu:
            return "cpu" if runs(name, like, *problem(), cpu=True) else plain
        return "cuda" if launches(like) and runs(name, like, *problem()) else plain
    if asked not in (plain, "cuda", "cpu", "host", "emulated", "reference"):
        names = "auto, torch, cuda, host" if plain == "torch" else "auto, cuda, host"
        raise ConfigError(f"{name}: backend must be {names} or reference, not {asked!r}")
    if asked != "reference":
        runtime.refuse_transforms(name)
    there = like.is_cuda if asked == "cuda" else like.is_cpu
    if asked in ("cuda", "cpu", "host", "emulated") and not there:
        raise KernelError(f"{name}: backend {asked!r} cannot run on tensors on {like.device}")
    return "cuda" if asked == "emulated" else asked  # the modules of a GPU are emulated for tensors of a CPU


def runs(name: str, like: Tensor, *problem: Any, cpu: bool = False) -> bool:
    """Whether the kernel of this name runs a problem on the device of `like`, in its dtype; `cpu`: that of a CPU.

    Raises:
        KernelError: the kernel is wrong; it is unavailable and ELMAN_KERNELS=require; or a CUDA graph is being captured
            before the first use.
    """
    if _asked is not None:
        _asked[name, like.dtype, *problem] = None
        return False
    return _decide(name, "cpu" if cpu else like.device.index, like.dtype, runtime.mode(), *problem)


@runtime.constant_when_compiled
def _decide(name: str, index: int | Literal["cpu"] | None, dtype: torch.dtype, chosen: str, *problem: Any) -> bool:
    """`torch.compile` calls this while it traces. The arguments must be plain values, each by itself. index: of a GPU."""
    key = (name, index, dtype, chosen, *problem)
    if key not in _decided:
        _decided[key] = chosen != "off" and _prepare(_kernels[name], index, dtype, problem)
    return _decided[key]


def _prepare(kernel: Compiled, index: int | Literal["cpu"] | None, dtype: torch.dtype, problem: Problem) -> bool:
    if index == "cpu":
        cases = kernel.cases(dtype, *problem)
        spec = runtime.load_or_warn(kernel.name, lambda: _compiled(kernel.spec(), cases))
        if spec is None:
            return False
        ensure_verified(spec, cases, "threads over rows and heads", "cpu")
        return True
    with torch.cuda.device(-1 if index is None else index):
        plan = runtime.load_or_warn(kernel.name, lambda: kernel.prepare(dtype, *problem))
        if plan is None:
            return False
        try:
            ensure_verified(kernel.spec(), kernel.cases(dtype, *problem), plan)
        except KernelUnavailableError as error:
            runtime.warn(kernel.name, error)
            return False
    return True


def _compiled(spec: KernelSpec, cases: Sequence[Case]) -> KernelSpec:
    """The spec of a kernel of a CPU, once what these cases run is compiled. Raises `KernelError` as `build_all`, and without
    sources."""
    module: Any = spec.module
    modules = dict.fromkeys((launch.extension(), *(module("cpu", case) for case in cases)))
    build_all([(each, local_arch(each)) for each in modules])
    return spec


def in_words(name: str, device: torch.device | str, plain: str, fits: Callable[..., bool]) -> str:
    """What "auto" runs, or without a kernel `plain`. Compiles nothing: before the first use, it says what will be tried.
    fits: `fits(*problem)`: whether a decided problem is one of those meant."""
    device = torch.device(device)
    kind = device.type
    if kind != "cuda" and not (kind == "cpu" and _kernels[name].cpu):
        return plain
    if runtime.mode() == "off":
        return f"{plain} (ELMAN_KERNELS=off)"
    index: Any = "cpu"
    if kind == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
    here = {key: found for key, found in _decided.items() if key[:2] == (name, index) and fits(*key[4:])}
    made = " and ".join(sorted({kind if found else plain for found in here.values()}))
    if made:
        return made
    if kind == "cuda":
        return "cuda, compiled at its first use"
    try:
        find_host_compiler()
        if find(launch.extension(), host_architecture()) is None:
            python_include_dirs()
    except KernelError as error:
        return f"{plain} ({str(error).partition(':')[0]})"
    return f"{plain}, or cpu where that pays"
