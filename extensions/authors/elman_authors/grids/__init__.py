"""The grids of `elman verify`, `elman check` and the contract: the problems on which kernels are compared with float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from elman_core.extension import Case, KernelSpec, Report, decoding_problem, verify_kernel

from . import decoding, matrix, recurrences
from .problems import Grid

_TABLES: dict[str, Callable[[Any], Sequence[recurrences.Table]]] = {
    "dense": lambda cell: [recurrences.BLOCKS if cell.blocks else recurrences.DENSE],
    "gates": lambda cell: [recurrences.GATES, *([recurrences.HEADS] if cell.inner is None else [])],
    "elementwise": lambda _cell: [recurrences.ELEMENTWISE],
    "rows": lambda _cell: [recurrences.ROWS],
    "causal_conv": lambda _cell: [recurrences.CONVOLUTION],
    "decode_step": lambda _cell: [decoding.STEP],
}


def cases(spec: KernelSpec, target: str, grid: Grid = "quick") -> Sequence[Case]:
    """About 20 problems for "quick", about 200 for "full", always the same. A kernel of no family states its own."""
    cell = spec.cell
    if spec.family == "decode":
        return [decoding_problem(kind, c) for kind, some in decoding.SHARED.items() for c in some.cases(grid)]
    if spec.family == "matrix":
        return list(matrix.cases(cell, target, grid))
    if spec.family == "matrix_step":
        return list(matrix.spread(cell, matrix.STEPS, grid))
    if spec.family:
        return [c for table in _TABLES[spec.family](cell) for c in table[target].cases(grid, cell.name)]
    return spec.cases(target, grid)


def problems(
    spec: KernelSpec, backend: str, grid: Grid = "quick", dtypes: Sequence[torch.dtype] = ()
) -> Sequence[Case]:
    """The cases on which a back end of the kernel is checked; none if it has no such back end. dtypes: only these, if any."""
    if dtypes:
        return [case for case in problems(spec, backend, grid) if case.dtype in dtypes]
    if backend not in spec.backends:
        return ()
    if backend == "emulated":
        return spec.emulated
    return cases(spec, backend if backend in ("cuda", "cpu") else "host", grid)


def verify(
    spec: KernelSpec, backend: str, grid: Grid = "quick", dtypes: Sequence[torch.dtype] = (), **how: Any
) -> Report:
    """`verify_kernel` on a grid.

    Args:
        dtypes: run only these; empty means all of the grid's. how: further arguments of `verify_kernel`.
    """
    return verify_kernel(spec, backend, problems(spec, backend, grid, dtypes), grid=grid, **how)
