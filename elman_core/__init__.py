"""Recurrent language models as plugins. Importing this package imports neither torch, nor transformers, nor a plugin."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._auto import install as _install

if TYPE_CHECKING:
    from .model import (
        LadderCache,
        LadderConfig,
        LadderForCausalLM,
        LadderForSequenceClassification,
        LadderForTokenClassification,
        LadderLM,
        LadderModel,
        LadderStaticCache,
        byte_tokenizer,
        find_checkpoint,
    )  # fmt: skip
    from .registry import (
        ConfigError,
        ElmanError,
        Mixer,
        PluginError,
        State,
        Variant,
        get_variant,
        hookimpl,
        list_variants,
        option,
    )  # fmt: skip

__version__ = "0.1.0"

__all__ = [
    "ConfigError", "ElmanError", "LadderCache", "LadderConfig", "LadderForCausalLM", "LadderForSequenceClassification",
    "LadderForTokenClassification", "LadderLM", "LadderModel", "LadderStaticCache", "Mixer", "PluginError", "State",
    "Variant", "__version__", "byte_tokenizer", "find_checkpoint", "get_variant", "hookimpl", "list_variants", "option",
]  # fmt: skip


if not TYPE_CHECKING:  # a type checker knows the names from above, and which ones there are not

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        registry = importlib.import_module(f"{__name__}.registry")
        return getattr(registry if name in registry.__all__ else importlib.import_module(f"{__name__}.model"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_install()
