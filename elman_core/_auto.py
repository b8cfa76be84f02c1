"""Make `AutoModelForCausalLM.from_pretrained` know our checkpoints once `elman_core` is imported, at no cost before.

Transformers has no plugin discovery, so the Auto classes must be registered. `import elman_core.model` does that. Importing
`elman_core` alone must stay cheap, so it registers at once if transformers' Auto classes are already there, and otherwise
watches the imports of transformers: once its Auto classes exist and none of its modules is half-imported (our modules would
then miss names), it registers and stops watching.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

PACKAGE = "transformers"
TARGET = "transformers.models.auto.configuration_auto"


def _register() -> None:
    importlib.import_module("elman_core.model")


class _Loader(importlib.abc.Loader):
    """Loads a module of transformers as its own loader would, and tells the finder when loading begins and ends."""

    def __init__(self, inner: importlib.abc.Loader, finder: _Finder) -> None:
        self.inner, self.finder = inner, finder

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self.inner
        module.__loader__ = self.inner
        self.finder.loading += 1
        try:
            self.inner.exec_module(module)
        finally:
            self.finder.loading -= 1
        self.finder.loaded()


class _Finder(importlib.abc.MetaPathFinder):
    loading = 0

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if path is None or not fullname.startswith(f"{PACKAGE}."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec

    def loaded(self) -> None:
        if self.loading == 0 and TARGET in sys.modules and self in sys.meta_path:
            sys.meta_path.remove(self)
            _register()


def install() -> None:
    """Register now if the Auto classes are already there, or as soon as they are."""
    if TARGET in sys.modules:
        _register()
    elif not any(isinstance(f, _Finder) for f in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
