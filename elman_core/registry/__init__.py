"""The installed hooks and variants, and how a name becomes one. The only place that knows pluggy.

`Mixer` and its types are loaded when first requested: they need torch, and an error about a file or a setting should not
have to wait for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elman_core.imports import when_asked

from .errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DivergedError,
    ElmanError,
    KernelError,
    LoaderError,
    OutOfMemoryError,
    PluginError,
    RankError,
    StorageError,
    did_you_mean,
)
from .hookspecs import hookimpl
from .installing import how_to_install, pip_install
from .names import Resolved, get_variant, list_variants, parse_size, resolve
from .plugins import Broken, Installed, package_folders, plugins
from .variant import Published, Variant, check_value, config_to_dict, option

if TYPE_CHECKING:
    from .mixer import Mixer, State, StateSpec

__all__ = [
    "Broken", "CheckpointError", "ConfigError", "DataError", "DivergedError", "ElmanError", "Installed", "KernelError",
    "LoaderError", "Mixer", "OutOfMemoryError", "PluginError", "Published", "RankError", "Resolved", "State", "StateSpec",
    "StorageError", "Variant", "check_value", "config_to_dict", "did_you_mean", "get_variant", "hookimpl",
    "how_to_install", "list_variants", "option", "package_folders", "parse_size", "pip_install", "plugins", "resolve",
]  # fmt: skip

__getattr__ = when_asked(__name__)
