"""The names of the core for extensions, besides `elman_core` itself. Importing this module imports neither torch nor a plugin.

An extension is a package with commands (entry points in the group `elman.commands`), loggers (`elman.loggers`) or sources of
batches (`elman.sources`, see `Source`); see docs/how-to/extension.md. Each name is documented where it is defined.
"""

# ruff: noqa: F401 (the names are read from _NAMES when they are asked for)

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cli._text import columns, dump, free_folder, print, table, wrapped
    from .cli.export import Precision
    from .cli.generate import load_writer
    from .cli.train import read_settings
    from .data import Batch, ByteFile, Heldout, Source, hash_u64, standard_library_corpus
    from .data.packed import PACKED_FORMAT, PACKED_HEADER, PackedFile, packed_manifest, packed_sections
    from .generation import Sampling
    from .generation.loop import least_rows, prefill_chunk
    from .kernels.decode.portable import kept_scores, race
    from .kernels.dispatch import SHORTEST
    from .locks import MACHINE_WIDE, Lock, holder, is_locked, lock_soon
    from .metrics import METRICS, WINDOW, Metrics, progress, read_metrics
    from .model.step_graph import GraphedStep, recorder_for
    from .model.tokenizer import load_tokenizer, vocabulary_texts
    from .nn import scaled_once
    from .nn.layers import resolve_pattern
    from .registry import (
        CheckpointError,
        ConfigError,
        DataError,
        DivergedError,
        ElmanError,
        OutOfMemoryError,
        PluginError,
        check_value,
        did_you_mean,
        errors,
        how_to_install,
        parse_size,
        resolve,
    )
    from .registry.checks import ran_out
    from .registry.errors import printable
    from .registry.extensions import load_extension, packages
    from .size import TOLERANCE, count, parse_parameters, solve_width
    from .storage import (
        appending,
        log_line,
        now,
        open_regular,
        read_bytes,
        read_json,
        read_line,
        replacing,
        require_text,
        storage_errors,
        sync,
        write_folder,
        write_json,
        write_text,
    )
    from .training import Settings, TrainSettings
    from .training.precision import pick_device
    from .training.recipes import folders
    from .training.run.display import backends
    from .training.run.facts import memory_in_use
    from .training.run.protocol import protocol_hash
    from .training.settings import RESUMABLE, TUNABLE, apply_sets, from_dict, known_keys, put, steps_for_tokens
    from .training.settings import resolve as resolve_settings
    from .training.start import start
    from .training.text import open_text

_NAMES = {
    "cli._text": "columns dump free_folder print table wrapped",
    "cli.export": "Precision",
    "cli.generate": "load_writer",
    "cli.train": "read_settings",
    "data": "Batch ByteFile Heldout Source hash_u64 standard_library_corpus",
    "data.packed": "PACKED_FORMAT PACKED_HEADER PackedFile packed_manifest packed_sections",
    "generation": "Sampling",
    "generation.loop": "least_rows prefill_chunk",
    "kernels.decode.portable": "kept_scores race",
    "kernels.dispatch": "SHORTEST",
    "locks": "MACHINE_WIDE Lock holder is_locked lock_soon",
    "metrics": "METRICS WINDOW Metrics progress read_metrics",
    "model.step_graph": "GraphedStep recorder_for",
    "model.tokenizer": "load_tokenizer vocabulary_texts",
    "nn": "scaled_once",
    "nn.layers": "resolve_pattern",
    "registry": "CheckpointError ConfigError DataError DivergedError ElmanError OutOfMemoryError PluginError "
    "check_value did_you_mean errors how_to_install parse_size resolve",
    "registry.checks": "ran_out",
    "registry.errors": "printable",
    "registry.extensions": "load_extension packages",
    "size": "TOLERANCE count parse_parameters solve_width",
    "storage": "appending log_line now open_regular read_bytes read_json read_line replacing require_text storage_errors sync "
    "write_folder write_json write_text",
    "training": "Settings TrainSettings",
    "training.precision": "pick_device",
    "training.recipes": "folders",
    "training.run.display": "backends",
    "training.run.facts": "memory_in_use",
    "training.run.protocol": "protocol_hash",
    "training.settings": "RESUMABLE TUNABLE apply_sets from_dict known_keys put resolve_settings steps_for_tokens",
    "training.start": "start",
    "training.text": "open_text",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [*_HOME]


if not TYPE_CHECKING:  # a type checker knows the names from above, and which ones there are not

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = importlib.import_module(f"elman_core.{_HOME[name]}")
        return getattr(module, "resolve" if name == "resolve_settings" else name)
