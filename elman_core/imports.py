"""Cheaper imports."""

from __future__ import annotations

import ast
import gc
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def without_collection() -> Iterator[None]:
    """Turns garbage collection off around imports. They make about a million objects, all of which stay: collection would
    take a quarter of the time to import transformers and find nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def homes_of(module: str) -> dict[str, tuple[str, str]]:
    """The names that a module imports under `if TYPE_CHECKING`: the module of each, and its name there."""
    ifs = [n for n in ast.parse(inspect.getsource(sys.modules[module])).body if isinstance(n, ast.If)]
    nodes = [n for b in ifs if ast.unparse(b.test) == "TYPE_CHECKING" for n in b.body if isinstance(n, ast.ImportFrom)]
    return {a.asname or a.name: (f".{node.module}", a.name) for node in nodes if node.level for a in node.names}


def when_asked(module: str) -> Callable[[str], Any]:
    """A `__getattr__` for a module that imports each of its `homes_of` when it is asked for."""
    homes, package = homes_of(module), sys.modules[module].__package__

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, own = homes[name]
        return getattr(importlib.import_module(home, package), own)

    return get
