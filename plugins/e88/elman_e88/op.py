"""The recurrence: the one place that chooses an implementation."""

from __future__ import annotations

from pathlib import Path

from elman_core.kernels import MatrixKernel

from .reference import e88_reference

__all__ = ["e88", "e88_fused", "matrix"]

matrix = MatrixKernel(
    "e88",
    header=Path(__file__).parent / "csrc" / "e88_cell.h",
    cell="elman::e88::Cell",
    reference=e88_reference,
)
e88 = matrix  # as `e88_reference`, on the fastest back end that this device has
e88_fused = matrix.fused  # the same from raw projections: q, k and v side by side in one tensor
