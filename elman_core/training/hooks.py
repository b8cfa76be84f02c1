"""Calls of the trainer's hooks. What a plugin raises ends the run with the plugin named."""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from elman_core.metrics import COLUMNS
from elman_core.registry import ConfigError, PluginError, plugins
from elman_core.registry.checks import check_hooks, one_line, said_when_slow
from elman_core.registry.extensions import load_extension

OBSERVE = ("elman_run_start", "elman_step_end", "elman_evaluation_end", "elman_checkpoint_saved", "elman_run_end")
ACT = ("elman_loss_terms", "elman_before_optimizer_step")
RESERVED = ("kind", "bits_per_byte", "fill", *COLUMNS)


def call(name: str, **arguments: Any) -> list[Any]:
    """Call a hook of every plugin that implements it; results other than None, last registered first.
    Raises `PluginError` if an implementation raised; the cause is chained."""
    hook = getattr(plugins().hook, name)
    noted: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if name in ("elman_run_start", "elman_run_end"):
        thread = threading.get_ident()
        noted = said_when_slow(lambda: f"{name} of plugin {_culprit(hook, _stack(thread))}")
    try:
        with noted:
            return hook(**arguments)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also SystemExit
        running = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
        raise PluginError(f"plugin {_culprit(hook, running)} failed in {name}: {one_line(error)}") from error


def hook_plugins(hooks: Sequence[str] = (*OBSERVE, *ACT)) -> dict[str, list[str]]:
    """The plugins behind each of these hooks of a run."""
    plugin_names = {n: sorted(i.plugin_name for i in getattr(plugins().hook, n).get_hookimpls()) for n in hooks}
    return {name: names for name, names in plugin_names.items() if names}


def acting() -> dict[str, list[str]]:
    """The plugins that change a training, by hook: for the manifest."""
    return hook_plugins(ACT)


def load_loggers(names: str) -> dict[str, Any]:
    """The loggers that `train.loggers` names. Raises `ConfigError` if one is not installed, `PluginError` if one is broken, or
    does more than observe."""
    wanted = filter(None, (name.strip() for name in names.split(",")))
    try:
        return {f"{name} (logger)": load_extension("loggers", name, _check_logger) for name in wanted}
    except ConfigError as error:
        raise ConfigError(f"{error}; without it: --set train.loggers=") from error


def _check_logger(logger: Any) -> None:
    check_hooks(logger)
    if more := [hook for hook in (*ACT, "elman_variants") if hasattr(logger, hook)]:
        raise PluginError(f"it implements {more[0]}; a logger observes: {', '.join(OBSERVE)}")


@contextlib.contextmanager
def listening_in(loggers: Mapping[str, Any]) -> Iterator[None]:
    """Inside, hooks call these loggers, too."""
    manager = plugins().manager
    for name, logger in loggers.items():
        manager.register(logger, name=name)
    try:
        yield
    finally:
        for name in loggers:
            manager.unregister(name=name)


def watched() -> bool:
    """Whether a plugin looks at a run between two steps, or acts on it."""
    return bool(acting()) or bool(plugins().hook.elman_step_end.get_hookimpls())


def loss_terms(run: Any, outputs: Any) -> dict[str, Tensor]:
    """The terms that plugins add to the loss of a micro-batch. Raises `PluginError` if a plugin raised, or for a term that is
    not a scalar, or is named like another or like a metric."""
    if not plugins().hook.elman_loss_terms.get_hookimpls():
        return {}
    terms: dict[str, Tensor] = {}
    for returned in call("elman_loss_terms", run=run, outputs=outputs):
        if not isinstance(returned, Mapping):
            raise PluginError(f"elman_loss_terms returns {{name: scalar}}, not {type(returned).__name__}")
        for name, value in returned.items():
            if name in terms or name in RESERVED:
                raise PluginError(f"elman_loss_terms: the name {name!r} is taken; choose another for this loss term")
            if not isinstance(value, Tensor) or value.numel() != 1:
                raise PluginError(f"elman_loss_terms: {name!r} must be a tensor with one element")
            terms[name] = value.reshape(())
    return terms


def _stack(thread: int) -> set[Any]:
    """The code of the functions that a thread is in."""
    return {frame.f_code for frame, _ in traceback.walk_stack(sys._current_frames().get(thread))}


def _culprit(hook: Any, running: set[Any]) -> str:
    """The plugin of which one of the functions is `running`."""
    for implementation in hook.get_hookimpls():
        if getattr(implementation.function, "__code__", None) in running:
            return implementation.plugin_name
    return "(unknown)"
