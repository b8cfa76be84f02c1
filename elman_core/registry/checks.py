"""The checks of a plugin before anything of it is used. Each error is one line that its author can act on."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import logging
import re
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields
from importlib import metadata
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from . import hookspecs
from .errors import ConfigError, ElmanError, PluginError, did_you_mean, printable
from .variant import Variant, config_to_dict

CORE = "elman-core"
log = logging.getLogger("elman_core")
HOOKS: dict[str, Any] = {n: f for n, f in vars(hookspecs).items() if n.startswith("elman_")}


def one_line(error: BaseException) -> str:
    """The kind of an error and what it says, on one line of at most 500 characters."""
    said = ""
    with contextlib.suppress(Exception):  # of a plugin
        said = str(error)
    whole = " ".join(f"{type(error).__name__}: {said}".split()).removesuffix(":")
    return textwrap.shorten(printable(whole), 500, placeholder=" …")


def ran_out(error: BaseException) -> bool:
    """Whether an error says that the memory of a device or of the machine is full: one of Python, of torch or a library below
    it (another process may have taken what they wanted to allocate), or of a kernel's launch."""
    said = str(error) if isinstance(error, RuntimeError) else ""
    if isinstance(error, ElmanError):
        return said.endswith(": out of memory")
    of_torch = any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)
    words = ("out of memory", "ALLOC_FAILED", "can't allocate memory")
    return of_torch or isinstance(error, MemoryError) or any(word in said for word in words)


@contextlib.contextmanager
def said_when_slow(what: Callable[[], str], seconds: float = 5.0) -> Iterator[None]:
    """Log what the program is waiting for if the block takes longer."""
    timer = threading.Timer(seconds, lambda: log.warning("elman: still waiting for %s", what()))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _shared() -> tuple[str, str, bool]:
    """Return torch's state of the whole process: default dtype, default device, and whether gradients are recorded."""
    torch: Any = sys.modules.get("torch")
    if not hasattr(torch, "set_grad_enabled"):
        return "float32", "cpu", True
    return str(torch.get_default_dtype())[6:], str(torch.get_default_device()), torch.is_grad_enabled()


@contextlib.contextmanager
def shared_state_kept() -> Iterator[None]:
    """Put back what the block changes in torch for the whole process, and raise `PluginError` for it."""
    before = after = _shared()
    try:
        yield
    finally:
        if (after := _shared()) != before:
            torch: Any = sys.modules["torch"]
            torch.set_default_dtype(getattr(torch, before[0]))
            torch.set_default_device(None if before[1] == "cpu" else before[1])
            torch.set_grad_enabled(before[2])
    if after != before:
        dtype, device, on = after
        raise PluginError(f"it changes torch's defaults: dtype {dtype}, device {device}, grad {'on' if on else 'off'}")


def check_hooks(plugin: Any) -> None:
    """Every hook that `plugin` implements exists, is marked and takes arguments that exist; it implements at least one.

    pluggy assumes that a misspelt hook belongs to somebody else, and ignores an unmarked function: neither gives an error.

    Raises:
        PluginError: says which, with the right spelling.
    """
    mine = []
    for name in dir(plugin):
        function = getattr(plugin, name, None)
        if not name.startswith("elman_") or not inspect.isroutine(function):
            continue
        if not hasattr(function, "elman_impl"):
            if name in HOOKS:
                raise PluginError(f"{name} is not marked: write @hookimpl above it (from elman_core import hookimpl)")
            continue
        if name not in HOOKS:
            raise PluginError(f"there is no hook {name!r}.{did_you_mean(name, HOOKS)} Hooks: {', '.join(HOOKS)}")
        _check_arguments(name, function)
        mine.append(name)
    if not mine:
        raise PluginError(f"it implements no hook; mark elman_variants with @hookimpl. Hooks: {', '.join(HOOKS)}")


def _check_arguments(name: str, function: Any) -> None:
    allowed = list(inspect.signature(HOOKS[name]).parameters)
    for argument in inspect.signature(function).parameters:
        if argument not in allowed:
            takes = f"its arguments: {', '.join(allowed)}" if allowed else "it takes none"
            raise PluginError(f"hook {name} has no argument {argument!r}.{did_you_mean(argument, allowed)} {takes}")


def collect(results: Iterable[Any]) -> tuple[Variant, ...]:
    """The variants that the implementations of `elman_variants` in one plugin returned, each checked. Raises `PluginError`:
    something else than variants, a bad name, one name twice, a preset or alias that does not work."""
    variants: list[Variant] = []
    for result in results:
        if not isinstance(result, Iterable):
            raise PluginError(f"elman_variants must yield Variant objects; it returned {type(result).__name__}")
        for variant in result:
            _check_variant(variant)
            if any(variant.name == v.name for v in variants):
                raise PluginError(f"elman_variants yields variant {variant.name!r} twice")
            variants.append(variant)
    return tuple(variants)


_KINDS: dict[str, Any] = {
    "summary": str, "equation": (str, Callable), "presets": Mapping, "aliases": Mapping, "published": (tuple, list),
    "recommended": str, "requires": (tuple, list), "accelerated_by": Mapping, "kernels": (tuple, list), "mixer": (type, tuple),
}  # fmt: skip


def _check_variant(variant: Any) -> None:
    if not isinstance(variant, Variant):
        raise PluginError(f"elman_variants must yield Variant objects, not {type(variant).__name__}")
    if not isinstance(variant.name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", variant.name):
        raise PluginError(f"a variant's name is lower case letters, digits and _, not {variant.name!r}")
    for name, kind in _KINDS.items():
        if not isinstance(getattr(variant, name), kind):
            raise PluginError(f"{name} of variant {variant.name!r} cannot be {getattr(variant, name)!r}")
    names = (*variant.presets, *variant.aliases, *variant.requires, *variant.accelerated_by)
    if odd := [name for name in names if not isinstance(name, str)]:
        raise PluginError(f"variant {variant.name!r} has a name that is not text: {odd[0]!r}")
    if any(not hasattr(kernel, "targets") for kernel in variant.kernels):
        raise PluginError(f"kernels of variant {variant.name!r} must be KernelSpecs: write kernels=KERNEL.specs()")
    if not (isinstance(variant.config, type) and "__dataclass_fields__" in vars(variant.config)):
        raise PluginError(f"config of {variant.name!r} needs @dataclass(frozen=True) above it: {variant.config!r}")
    if bare := [f.name for f in fields(variant.config) if f.default is f.default_factory is MISSING]:
        raise PluginError(f"option {bare[0]!r} of variant {variant.name!r} needs a default")
    try:
        variant.make_config(config_to_dict(variant.config()))
    except ConfigError as error:
        raise PluginError(f"{error}, which is its default") from error
    for preset in (*variant.presets, variant.recommended):
        variant.make_config(preset=preset)
    for alias, target in variant.aliases.items():
        if not isinstance(target, str):
            variant.make_config(target)
        elif target and target not in variant.presets:
            raise PluginError(f"alias {alias!r} of {variant.name!r} means preset {target!r}, which does not exist")


def needs_core(dist: metadata.Distribution | None) -> str:
    """The range of the core that a package asks for, if this core is outside it, as a requirement; else an empty string."""
    for line in (dist.requires or []) if dist else []:
        try:
            wanted = Requirement(line)
        except InvalidRequirement:
            continue
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        ours = wanted.name.lower().replace("_", "-") == CORE
        if ours and not wanted.specifier.contains(metadata.version(CORE), prereleases=True):
            return f"{CORE}{wanted.specifier}"
    return ""


def is_missing(module: str) -> bool:
    """Whether a module cannot be found; looks without importing it (its parent packages are imported, as find_spec does)."""
    try:
        return importlib.util.find_spec(module) is None
    except KeyboardInterrupt:
        raise
    except BaseException:  # a parent is missing or broken, whatever it raises; a module without a spec
        return True
