"""The names of the core for extensions, besides `elman_core` itself. Importing this module imports neither torch nor a plugin.

An extension is a package with commands (entry points in the group `elman.commands`), loggers (`elman.loggers`), sources of
batches (`elman.sources`, see `Source`) and the like; see docs/how-to/extension.md. Each name is documented where it is defined.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .imports import when_asked
from .registry.installing import moved

if TYPE_CHECKING:
    from .cli._text import columns, dump, print, table, wrapped
    from .cli.export import DTYPES
    from .cli.generate import Storage, load_writer
    from .cli.inspect import variant_options
    from .cli.train import leave, read_settings
    from .data import (
        Batch,
        ByteFile,
        Heldout,
        Source,
        TrainingWindows,
        hash_u64,
        heldout_offsets,
        open_file,
        split,
    )
    from .data.packed import PACKED_FORMAT, PACKED_HEADER, PackedFile, packed_manifest, packed_sections
    from .generation import Sampling
    from .generation.decoder import Program, Run, Step, StepRecorder, recorder_for
    from .generation.int8 import in_int8
    from .generation.loop import document_start
    from .generation.prefill import least_rows, prefill_chunk
    from .generation.sampling import choose, noise
    from .kernels.build import Extension as KernelExtension
    from .kernels.build import awaited, beside, cache_dirs, emulated, local_arch, locked, shipped, writable_cache
    from .kernels.build import build as build_kernel
    from .kernels.build import build_all as build_kernels
    from .kernels.build import find as find_kernel
    from .kernels.causal_conv.op import Kernel as ConvolutionKernel
    from .kernels.decode.op import MOST_CLASSES
    from .kernels.decode.op import Shared as DecodingKernels
    from .kernels.decode.portable import kept_scores, race
    from .kernels.decode.spec import DTYPES as DECODED_DTYPES
    from .kernels.decode.spec import shared as decoding_problem
    from .kernels.dense.native import TIMEOUT_NS, check_errors, error_word
    from .kernels.dispatch import SHORTEST, asking, builds, registered
    from .kernels.family import Family
    from .kernels.family import Row as FamilyRow
    from .kernels.launch import extension as launcher
    from .kernels.launch import on as on_device
    from .kernels.launch import opened
    from .kernels.launch import stream as current_stream
    from .kernels.launch import whole as contiguous
    from .kernels.matrix.problems import case as matrix_case
    from .kernels.matrix.problems import every_wide as matrix_wide
    from .kernels.runtime import CPU_DTYPES, DTYPE_CODES, load_or_warn, row_by_row
    from .kernels.runtime import mode as kernel_mode
    from .kernels.spec import Case, Inputs, KernelSpec
    from .kernels.toolchain import find_host_compiler, find_nvcc, python_include_dirs
    from .kernels.verify import RECORDED_FACTOR, Report, Row, check_inputs, failures, limit_of, modules_of, read_record
    from .kernels.verify import verify as verify_kernel
    from .kernels.verify_cache import save as save_stamp
    from .kernels.verify_cache import stamp
    from .locks import Lock, open_lock
    from .metrics import METRICS, WINDOW, Metrics, progress, read_metrics
    from .model.checkpoint import load_checkpoint, locate
    from .model.graph import HostCopy, Recorder, try_to_record
    from .model.step_graph import GraphedStep, is_watched
    from .model.tokenizer import load_tokenizer, vocabulary_size, vocabulary_texts
    from .nn import WrapperMixer, scaled_once
    from .nn.layers import resolve_pattern
    from .registry import (
        CheckpointError,
        ConfigError,
        DataError,
        DivergedError,
        ElmanError,
        KernelError,
        OutOfMemoryError,
        PluginError,
        Resolved,
        StorageError,
        check_value,
        config_to_dict,
        did_you_mean,
        errors,
        how_to_install,
        parse_size,
        plugins,
        resolve,
    )
    from .registry.checks import is_missing, one_line, ran_out
    from .registry.errors import printable
    from .registry.extensions import KINDS, extensions, load_extension, packages
    from .size import count
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
    from .training.plan import build_model
    from .training.precision import pick_device
    from .training.recipes import find_recipe, folders
    from .training.run.display import backends
    from .training.run.facts import memory_in_use
    from .training.run.protocol import protocol_hash
    from .training.settings import RESUMABLE, TUNABLE, apply_sets, from_dict, known_keys, put, steps_for_tokens
    from .training.settings import resolve as resolve_settings
    from .training.start import start
    from .training.text import open_text

__all__ = [
    "CPU_DTYPES", "DECODED_DTYPES", "DTYPES", "DTYPE_CODES", "KINDS", "METRICS", "MOST_CLASSES", "PACKED_FORMAT",
    "PACKED_HEADER", "RECORDED_FACTOR", "RESUMABLE", "SHORTEST", "TIMEOUT_NS", "TUNABLE", "WINDOW", "Batch", "ByteFile", "Case",
    "CheckpointError", "ConfigError", "ConvolutionKernel", "DataError", "DecodingKernels", "DivergedError", "ElmanError",
    "Family", "FamilyRow", "GraphedStep", "Heldout", "HostCopy", "Inputs", "KernelError", "KernelExtension", "KernelSpec",
    "Lock", "Metrics", "OutOfMemoryError", "PackedFile", "PluginError", "Program", "Recorder", "Report", "Resolved", "Row",
    "Run", "Sampling", "Settings", "Source", "Step", "StepRecorder", "Storage", "StorageError", "TrainSettings",
    "TrainingWindows", "WrapperMixer", "appending", "apply_sets", "asking", "awaited", "backends", "beside", "build_kernel",
    "build_kernels", "build_model", "builds", "cache_dirs", "check_errors", "check_inputs", "check_value", "choose", "columns",
    "config_to_dict", "contiguous", "count", "current_stream", "decoding_problem", "did_you_mean", "document_start", "dump",
    "emulated", "error_word", "errors", "extensions", "failures", "find_host_compiler", "find_kernel", "find_nvcc",
    "find_recipe", "folders", "from_dict", "hash_u64", "heldout_offsets", "how_to_install", "in_int8", "is_missing",
    "is_watched", "kept_scores", "kernel_mode", "known_keys", "launcher", "least_rows", "leave", "limit_of", "load_checkpoint",
    "load_extension", "load_or_warn", "load_tokenizer", "load_writer", "local_arch", "locate", "locked", "log_line",
    "matrix_case", "matrix_wide", "memory_in_use", "modules_of", "noise", "now", "on_device", "one_line", "open_file",
    "open_lock", "open_regular", "open_text", "opened", "packages", "packed_manifest", "packed_sections", "parse_size",
    "pick_device", "plugins", "prefill_chunk", "print", "printable", "progress", "protocol_hash", "put", "python_include_dirs",
    "race", "ran_out", "read_bytes", "read_json", "read_line", "read_metrics", "read_record", "read_settings",
    "recorder_for", "registered", "replacing", "require_text", "resolve", "resolve_pattern", "resolve_settings", "row_by_row",
    "save_stamp", "scaled_once", "shipped", "split", "stamp", "start", "steps_for_tokens", "storage_errors", "sync", "table",
    "try_to_record", "variant_options", "verify_kernel", "vocabulary_size", "vocabulary_texts", "wrapped", "writable_cache",
    "write_folder", "write_json", "write_text",
]  # fmt: skip

_MOVED = {
    "standard_library_corpus": ("corpus", "demo", "commands"), "CpuRecorder": ("steps.recorder", "steps", "programs"),
    **dict.fromkeys(("batched_step", "fingerprint"), ("steps.step", "steps", "programs")),
    **dict.fromkeys(("POINTWISE", "SAME", "Operation", "Tape", "memory"), ("tape", "steps", "programs")),
}  # fmt: skip


if not TYPE_CHECKING:  # a type checker knows the names from above, and which ones there are not
    _get = when_asked(__name__)

    def __getattr__(name: str) -> Any:
        if name in _MOVED:
            module, point, kind = _MOVED[name]
            raise ImportError(moved(f"{__name__}.{name}", point, f"{module}.{name}", kind))
        return _get(name)
