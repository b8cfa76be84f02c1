"""Kernels: compiled on the machine that runs them (`build`), one object for each cell (`dense`, `matrix`), checked (`verify`).

Environment variables: `ELMAN_KERNELS` (auto, off, require), `ELMAN_CACHE` (folders of compiled kernels and stamps) and
`ELMAN_VERIFY` (skip). Importing this package does not import torch, nor does building.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elman_core.imports import when_asked
from elman_core.registry.errors import KernelError, KernelUnavailableError

if TYPE_CHECKING:
    from .build import Extension, emulated, load, shipped
    from .dense.native import check_errors, error_word
    from .dense.op import DenseKernel
    from .dense.portable import product
    from .dispatch import Compiled, choose, in_words, register
    from .elementwise.op import ElementwiseKernel
    from .gates.op import GatesKernel
    from .launch import together
    from .matrix.op import MatrixKernel
    from .matrix.spec import Maps
    from .rows.op import RowsKernel
    from .runtime import compute_dtype, load_or_warn, operator, transformed
    from .spec import Case, KernelSpec, document_starts, first_steps, padding_mask
    from .verify import Report
    from .verify_cache import Stamp, ensure_verified, stamp, used

__all__ = [
    "Case", "Compiled", "DenseKernel", "ElementwiseKernel", "Extension", "GatesKernel", "KernelError", "KernelSpec",
    "KernelUnavailableError", "Maps", "MatrixKernel", "Report", "RowsKernel", "Stamp", "check_errors", "choose",
    "compute_dtype", "document_starts", "emulated", "ensure_verified", "error_word", "first_steps", "in_words", "load",
    "load_or_warn", "operator", "padding_mask", "product", "register", "shipped", "stamp", "together", "transformed", "used",
]  # fmt: skip

__getattr__ = when_asked(__name__)
