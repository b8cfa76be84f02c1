"""What kernels of every family share: `ELMAN_KERNELS`, operators of `torch.library`, autocast, transforms, and the check of
inputs against a table of names, sizes and dtypes.

`ELMAN_KERNELS` decides what runs on a GPU. auto (the default): the kernel; without one, plain PyTorch after one loud warning
that says why and what to type. off: plain PyTorch; nothing is compiled. require: the kernel, or an error; benchmarks and kernel
tests always use it.

The operators of kernels do not support forward-mode derivatives and torch.func: an operator drops a tangent silently, and fails
under `torch.func.grad`. There, "auto" runs plain PyTorch, and naming a kernel is an error.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import Library, register_fake

from elman_core.registry.errors import ConfigError, KernelError

Mode = Literal["auto", "off", "require"]
Loaded = TypeVar("Loaded")
Called = TypeVar("Called", bound=Callable[..., Any])
DTYPE_CODES = {torch.float64: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
"""As in elman/dtype.h: what tensors may be stored in."""
CPU_DTYPES = (torch.float32, torch.bfloat16)
"""What kernels of a CPU store."""
_library = Library("elman", "FRAGMENT")
_log = logging.getLogger("elman_core")
_warned: set[tuple[str, str]] = set()
_MOST_PASSED = 4096
_passed: dict[tuple[Any, ...], dict[str, int]] = {}
_operators: dict[str, str] = {}


def compute_dtype(*of: Tensor | torch.dtype | None) -> torch.dtype:
    """The dtype of states and of computation in references: float64 if any of these tensors or dtypes is, else float32."""
    for x in of:
        if (x.dtype if isinstance(x, Tensor) else x) == torch.float64:
            return torch.float64
    return torch.float32


def mode() -> Mode:
    """The value of ELMAN_KERNELS. Raises `ConfigError`: it is none of auto, off and require."""
    value = os.environ.get("ELMAN_KERNELS", "auto")
    if value not in get_args(Mode):
        raise ConfigError(f"ELMAN_KERNELS must be auto, off or require, not {value!r}")
    return cast(Mode, value)


def constant_when_compiled(function: Called) -> Called:
    """As `torch.compiler.assume_constant_result`, without its import of torch._dynamo, which takes as long as torch itself."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def load_or_warn(name: str, load: Callable[[], Loaded]) -> Loaded | None:
    """The result of `load()`, or None if plain PyTorch must run instead.

    Args:
        name: of the kernel; a process logs each reason once.
        load: raises `KernelError` if the kernel is unavailable.

    Raises:
        KernelError: from `load`, with ELMAN_KERNELS=require.
    """
    try:
        return load() if mode() != "off" else None
    except KernelError as error:
        warn(name, error)
        return None


def warn(name: str, error: KernelError) -> None:
    """Log once why plain PyTorch runs instead of a kernel; with ELMAN_KERNELS=require, raise the error."""
    if mode() == "require":
        raise error
    if (name, str(error)) not in _warned:
        _warned.add((name, str(error)))
        _log.warning(
            "elman: NO KERNEL for %s, running plain PyTorch, many times slower: %s "
            "(ELMAN_KERNELS=require makes this an error, ELMAN_KERNELS=off silences it)",
            name,
            error,
        )


def caller() -> str:
    """The name of the module outside this package that called into it."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("elman_core."):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__"))


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
    if name in _operators:
        raise ConfigError(f"{_operators[name]} has a kernel of this name ({name}), too: choose another in {caller()}")
    _library.define(schema)
    _operators[name] = caller()
    _library.impl(name, run, "CompositeExplicitAutograd")
    register_fake(f"elman::{name}", fake, lib=_library)
    made: Callable[..., Any] = getattr(torch.ops.elman, name).default
    if differentiate is not None:

        def once(ctx: Any, *gradients: Any) -> Any:
            refuse_second_derivatives(name)
            there = next((g for g in gradients if g is not None), None)
            with nullcontext() if there is None else without_autocast(there):  # `backward()` may be called inside it
                return *differentiate(ctx, *gradients), None  # of the keys

        _library.impl(name, _recorded(name, made, cast(Callable[..., None], save), once), "Autograd", with_keyset=True)
    return made


def _recorded(
    name: str, op: Callable[..., Any], save: Callable[..., None], differentiate: Callable[..., Any]
) -> Callable[..., Any]:
    """What runs an operator and records it for the backward.

    `torch.library.register_autograd` does the same, but in every call reads all arguments of the schema once for each of them,
    which takes as long as several launches.
    """
    private: Any = torch._C

    def forward(ctx: Any, *given: Any) -> Any:
        *arguments, keys = given
        made = below(keys, *arguments)
        save(ctx, arguments, made)
        return made

    def below(keys: Any, *given: Any) -> Any:
        with private._AutoDispatchBelowAutograd():
            return cast(Any, op).redispatch(keys & private._after_autograd_keyset, *given)

    functions = {"forward": staticmethod(forward), "backward": staticmethod(differentiate)}
    apply: Callable[..., Any] = cast(Any, type(f"elman_{name}", (torch.autograd.Function,), functions)).apply

    def run(keys: Any, *given: Any) -> Any:
        if torch.is_grad_enabled() and private._any_requires_grad(*given):
            return apply(*given, keys)
        return below(keys, *given)

    return run


def results(step: Callable[..., Any], made: Any, count: int, words: str) -> tuple[Any, ...]:
    """What a step returned. Raises `ConfigError` unless it is a tuple of `count` tensors; `words` says which."""
    if isinstance(made, tuple) and len(made) == count:
        return made
    what = f"a tuple of {len(made)}" if isinstance(made, tuple) else f"a {type(made).__name__}"
    where = f"{step.__qualname__} of {step.__module__}"
    raise ConfigError(f"{where} must return a tuple of {count}, {words}, not {what}")


def tensors(count: int) -> str:
    """This many results, as a schema writes them: a single one in a list, as all functions return a tuple."""
    return f"({', '.join(['Tensor'] * count)})" if count > 1 else "Tensor[]"


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """A context in which autocast is off for the device of x."""
    kind = x.device.type
    on = has_autocast(kind) and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if on else nullcontext()


@contextmanager
def recording() -> Iterator[None]:
    """A context in which autograd records inside an operator, too: below a `TorchDispatchMode`, torch has switched it off."""
    private: Any = torch._C
    with torch.enable_grad(), private._SetExcludeDispatchKeyGuard(private.DispatchKey.AutogradFunctionality, False):
        yield


_TILE = 32  # rows of a block of AMX
_row_by_row: ContextVar[bool] = ContextVar("row_by_row", default=False)


@contextmanager
def row_by_row() -> Iterator[None]:
    """A context in which this thread adds no rows to products: a kernel that computes every row by itself will repeat them."""
    before = _row_by_row.set(True)
    try:
        yield
    finally:
        _row_by_row.reset(before)


def spare_rows(rows: int, like: Tensor) -> int:
    """How many rows to add to a product of so many, so that a row gets the same bits whatever is computed beside it.

    On a CPU, BLAS takes rows of float32 in fours and adds up what is left over in another order (some processors need
    more than that: docs/decisions/0050). 0 on other devices, where gradients are recorded, and in compiled code.
    """
    return -rows % 4 if _exact(like) else 0


def _exact(like: Tensor) -> bool:
    """Whether rows of a product must not see each other."""
    plain = like.device.type == "cpu" and not torch.is_grad_enabled() and not torch.compiler.is_compiling()
    return plain and not _row_by_row.get()


def with_spare(spare: int, dim: int, *given: Tensor | None) -> list[Any]:
    """The tensors with so many rows of zeros behind those of `dim`; None stays None."""
    return [None if x is None else F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, spare]) for x in given]


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear(x, weight, bias)`, batch-invariant: see `spare_rows`. Of 16-bit numbers, a single row may be summed otherwise
    (some AMD processors) and, with AMX, more than 32, which MKL_CBWR=AUTO,STRICT puts apart (docs/decisions/0050)."""
    if not _exact(x):
        return F.linear(x, weight, bias)
    rows = x.numel() // x.shape[-1]
    half = x.dtype.itemsize < 4
    strict = half and rows > _TILE and "STRICT" in os.environ.get("MKL_CBWR", "")
    if strict and torch.cpu._is_amx_tile_supported():
        blocks = x.reshape(rows, -1).split(_TILE)
        return torch.cat([F.linear(block, weight, bias) for block in blocks]).view(*x.shape[:-1], -1)
    spare = int(rows == 1) if half else spare_rows(rows, x)
    if not spare:
        return F.linear(x, weight, bias)
    (padded_RK,) = with_spare(spare, 0, x.reshape(rows, -1))
    return F.linear(padded_RK, weight, bias)[:rows].view(*x.shape[:-1], -1)


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


def transformed(vmap: bool = False) -> bool:
    """Whether derivatives are taken by other means than `backward`: torch.func.grad, jvp and their relatives, or
    `torch.autograd.forward_ad`. vmap alone, which runs an operator in a loop, counts only if asked: no `autograd.Function` of
    ours has a rule for it."""
    if torch.compiler.is_compiling():
        return False
    if forward_ad._current_level >= 0:
        return True
    functorch: Any = torch._C._functorch  # type: ignore[attr-defined]
    levels = functorch.get_interpreter_stack()
    if not levels:
        return False
    kind = functorch.TransformType
    counted = (kind.Grad, kind.Jvp, kind.Vmap) if vmap else (kind.Grad, kind.Jvp)
    return any(level.key() in counted for level in levels)


def refuse_second_derivatives(name: str) -> None:
    """Raise NotImplementedError if a derivative would itself be differentiated. No kernel's backward supports that."""
    if torch.is_grad_enabled():
        raise NotImplementedError(
            f"{name} has no second derivative (create_graph=True); recurrences have it with backend='reference'"
        )


def refuse_transforms(name: str) -> None:
    """Raise NotImplementedError for a kernel that was chosen by name, if `transformed` is true."""
    if transformed():
        raise NotImplementedError(
            f"{name}: torch.func and forward-mode derivatives exist only with backend='auto' or 'reference'; backward() "
            "exists with all"
        )


class Wanted(NamedTuple):
    """What one tensor must be.

    Attributes:
        shape: a letter for each size; equal letters are equal sizes, and "1" is one.
        dtype: "first": that of the first tensor; "computed": that or the dtype of its computation; "stored": any storage dtype.
        optional: whether it may be None.
    """

    shape: str
    dtype: Literal["first", "computed", "stored", "bool"] = "first"
    optional: bool = False


def check(
    kernel: str, wanted: Mapping[str, Wanted], given: Sequence[Any], sizes: Mapping[str, int] = MappingProxyType({})
) -> dict[str, int]:
    """Compare tensors with a table, in its order. The first one sets the dtype and the device.

    Comparing takes longer than a launch, so passed checks are remembered by kernel, shapes, dtypes and devices.

    Args:
        sizes: known sizes by their letters.

    Returns:
        all sizes by their letters.

    Raises:
        ConfigError: a tensor does not fit; names the first.
    """
    if torch.compiler.is_compiling():
        return _compare(kernel, wanted, given, sizes)
    try:
        key = (kernel, *[x is None or (x.shape, x.dtype, x.device) for x in given], *sizes.values())
    except AttributeError:  # not a tensor
        return _compare(kernel, wanted, given, sizes)
    if (found := _passed.get(key)) is None:
        if len(_passed) >= _MOST_PASSED:
            _passed.clear()
        found = _passed[key] = _compare(kernel, wanted, given, sizes)
    return found


def _compare(
    kernel: str, wanted: Mapping[str, Wanted], given: Sequence[Any], sizes: Mapping[str, int]
) -> dict[str, int]:
    first_name = next(iter(wanted))
    first = given[0]
    known = {"1": 1, **sizes}

    def words(shape: str) -> str:
        return f"({', '.join(str(known.get(letter, letter)) for letter in shape)})"

    for (name, (shape, dtype, optional)), x in zip(wanted.items(), given, strict=True):
        if x is None and optional:
            continue
        if not isinstance(x, Tensor):
            raise ConfigError(f"{kernel}: {name} must be a tensor {words(shape)}, not {x!r}")
        if (
            x.dim() != len(shape)
            or 0 in x.shape
            or any(known.get(n, s) != s for n, s in zip(shape, x.shape, strict=True))
        ):
            beside = "" if x is first else f" beside {first_name} {tuple(first.shape)}"
            raise ConfigError(
                f"{kernel}: {name} must be {words(shape)}{beside} with every size at least 1, not {tuple(x.shape)}"
            )
        known.update(zip(shape, x.shape, strict=True))
        dtypes = _dtypes(dtype, first)
        if x.dtype not in dtypes:
            names = ", ".join(str(each).removeprefix("torch.") for each in dtypes)
            beside = "" if x is first else f" beside {first_name} in {first.dtype}"
            raise ConfigError(f"{kernel}: {name} must be {names}{beside}, not {x.dtype}")
        if x.device != first.device:
            raise ConfigError(f"{kernel}: {name} is on {x.device}, {first_name} on {first.device}; move them together")
    return known


def _dtypes(kind: str, first: Tensor) -> Sequence[torch.dtype]:
    if kind == "stored":
        return tuple(DTYPE_CODES)
    if kind == "bool":
        return (torch.bool,)
    return (first.dtype,) if kind == "first" else (first.dtype, compute_dtype(first))
