"""Kernels: compiled on the machine that runs them (`build`), one object for each cell (`dense`, `matrix`), checked (`verify`).

Environment variables: `ELMAN_KERNELS` (auto, off, require), `ELMAN_CACHE` (folders of compiled kernels and stamps) and
`ELMAN_VERIFY` (skip). Importing this package does not import torch, nor does building.
"""

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
    from .spec import Case, KernelSpec, document_starts, padding_mask
    from .verify import Report
    from .verify_cache import Stamp, ensure_verified, stamp, used

_HOME = {
    "Case": "spec", "Compiled": "dispatch", "DenseKernel": "dense.op", "ElementwiseKernel": "elementwise.op",
    "Extension": "build", "GatesKernel": "gates.op",
    "KernelSpec": "spec", "Maps": "matrix.spec", "MatrixKernel": "matrix.op", "Report": "verify", "RowsKernel": "rows.op",
    "Stamp": "verify_cache",
    "check_errors": "dense.native", "choose": "dispatch", "compute_dtype": "runtime",
    "document_starts": "spec", "emulated": "build",
    "ensure_verified": "verify_cache",
    "error_word": "dense.native", "in_words": "dispatch", "load": "build", "load_or_warn": "runtime", "operator": "runtime",
    "padding_mask": "spec", "product": "dense.portable", "register": "dispatch", "shipped": "build",
    "stamp": "verify_cache", "used": "verify_cache",
}  # fmt: skip
__all__ = [
    "Case", "Compiled", "DenseKernel", "ElementwiseKernel", "Extension", "GatesKernel", "KernelError", "KernelSpec", "Maps",
    "MatrixKernel", "Report", "RowsKernel", "Stamp", "check_errors", "choose", "compute_dtype", "document_starts", "emulated",
    "ensure_verified",
    "error_word", "in_words", "load", "load_or_warn", "operator", "padding_mask", "product", "register", "shipped", "stamp",
    "used",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
