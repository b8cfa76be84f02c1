"""Make `AutoModelForCausalLM.from_pretrained` know our checkpoints once `elman_core` is imported, at no cost before.

Transformers has no plugin discovery, so the Auto classes must be registered. `import elman_core.model` does that. Importing
`elman_core` alone must stay cheap, so it registers at once if transformers' Auto classes are already there, and otherwise
watches the imports of transformers: once its Auto classes exist and none of its modules is half-imported (our modules would
then miss names), it registers and stops watching.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

PACKAGE = "transformers"
TARGET = "transformers.models.auto.configuration_auto"


def _register() -> None:
    importlib.import_module("elman_core.model")


def _try_entry_points() -> None:
    """torch reads every package's entry points as it is imported. Tell it not to if one cannot be read: it would not load."""
    from importlib import metadata

    for dist in metadata.distributions():
        try:
            _ = dist.entry_points
        except Exception:  # of one broken package, which `elman list` shows
            os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")


class _Finder:
    loading = 0

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname == "torch":
            _try_entry_points()
        if path is None or not fullname.startswith(f"{PACKAGE}."):
            return None
        spec: Any = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                """Load a module as its loader would, and register after the outermost one."""
                del spec.loader.exec_module  # the loader is as it was
                self.loading += 1
                try:
                    load(module)
                finally:
                    self.loading -= 1
                if self.loading == 0 and TARGET in sys.modules and self in sys.meta_path:
                    sys.meta_path.remove(self)
                    _register()

            spec.loader.exec_module = exec_module
        return spec


def install() -> None:
    """Register now if the Auto classes are already there, or as soon as they are."""
    if TARGET in sys.modules:
        _register()
    elif not any(isinstance(f, _Finder) for f in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
