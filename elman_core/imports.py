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


def when_asked(module: str) -> tuple[list[str], Callable[[str], Any]]:
    """The names that a module imports under `if TYPE_CHECKING`, and a `__getattr__` that imports each when it is asked for."""
    this = sys.modules[module]
    ifs = [n for n in ast.parse(inspect.getsource(this)).body if isinstance(n, ast.If)]
    nodes = [n for b in ifs if ast.unparse(b.test) == "TYPE_CHECKING" for n in b.body if isinstance(n, ast.ImportFrom)]
    homes = {a.asname or a.name: (f".{node.module}", a.name) for node in nodes if node.level for a in node.names}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, own = homes[name]
        return getattr(importlib.import_module(home, this.__package__), own)

    return [*homes], get
