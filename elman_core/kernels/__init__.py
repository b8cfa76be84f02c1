"""Kernels: compiled on the machine that runs them (`build`), one object for each cell (`dense`, `matrix`), checked (`verify`).

Environment variables: `ELMAN_KERNELS` (auto, off, require), `ELMAN_CACHE` (folders of compiled kernels and stamps) and
`ELMAN_VERIFY` (skip). Importing this package does not import torch, nor does building.
"""

# ruff: noqa: F401 (the names are read from _NAMES when they are asked for)

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from elman_core.registry.errors import KernelError

if TYPE_CHECKING:
    from .build import Extension, emulated, load, shipped
    from .dense.native import check_errors, error_word
    from .dense.op import DenseKernel
    from .dense.portable import product
    from .dispatch import Compiled, choose, in_words, register
    from .elementwise.op import ElementwiseKernel
    from .gates.op import GatesKernel
    from .matrix.op import MatrixKernel
    from .matrix.spec import Maps
    from .rows.op import RowsKernel
    from .runtime import compute_dtype, load_or_warn, operator
    from .spec import Case, KernelSpec, document_starts, first_steps, padding_mask
    from .verify import Report
    from .verify_cache import Stamp, ensure_verified, stamp, used

_NAMES = {
    "build": "Extension emulated load shipped", "dense.native": "check_errors error_word", "dense.op": "DenseKernel",
    "dense.portable": "product", "dispatch": "Compiled choose in_words register", "elementwise.op": "ElementwiseKernel",
    "gates.op": "GatesKernel", "matrix.op": "MatrixKernel", "matrix.spec": "Maps", "rows.op": "RowsKernel",
    "runtime": "compute_dtype load_or_warn operator",
    "spec": "Case KernelSpec document_starts first_steps padding_mask",
    "verify": "Report", "verify_cache": "Stamp ensure_verified stamp used",
}  # fmt: skip
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = ["KernelError", *_HOME]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
