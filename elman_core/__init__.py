"""Recurrent language models as plugins. Importing this package imports neither torch, nor transformers, nor a plugin."""

from __future__ import annotations

import importlib
from typing import Any

from ._auto import install as _install

__version__ = "0.1.0"

_HOME = {
    "LadderConfig": "model", "LadderModel": "model", "LadderForCausalLM": "model", "LadderLM": "model",
    "LadderForSequenceClassification": "model", "LadderForTokenClassification": "model",
    "LadderCache": "model", "LadderStaticCache": "model", "byte_tokenizer": "model",
    "Variant": "registry", "Mixer": "registry", "State": "registry", "option": "registry", "hookimpl": "registry",
    "get_variant": "registry", "list_variants": "registry",
    "ElmanError": "registry", "ConfigError": "registry", "PluginError": "registry",
}  # fmt: skip
__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_install()
