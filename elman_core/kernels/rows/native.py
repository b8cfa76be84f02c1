"""Run row recurrences in their compiled modules (`elman/rows_call.h` of `elman_csrc`): one for each dtype, K and V."""

from __future__ import annotations

import torch

from elman_core.kernels import build, launch
from elman_core.kernels.build import Extension, Target
from elman_core.kernels.family import Values
from elman_core.kernels.spec import Cell
from elman_core.registry.errors import KernelError

from .spec import DTYPES, FAMILY


def extension(name: str, dtype: torch.dtype, rows: int, columns: int, target: Target = "cuda") -> Extension:
    """What is compiled for a storage dtype, K and V. Raises `KernelError`: there is no kernel for these, or no source."""
    if target == "cpu" and max(rows, columns) > 128:
        raise KernelError(f"{name}: no kernel of a CPU for K={rows} V={columns}: they go up to 128")
    fits = dtype in DTYPES and rows % 16 == 0 and columns in (16, 32) and 0 < rows * columns <= 1024
    if target == "cuda" and not fits:
        raise KernelError(
            f"{name}: no kernel for K={rows} V={columns} in {dtype}. There are: V 16 or 32, K a multiple of 16, K V up to "
            "1024; bfloat16, float16"
        )
    sizes = f"{rows}x{columns}"
    return build.for_target(f"{name}_rows", "rows", target, sizes, DTYPE=dtype, ROWS=rows, COLUMNS=columns)


module = launch.opener(FAMILY, extension)


def run(cell: Cell, function: str, given: Values, values: Values) -> None:
    """As `Operator` calls it. Raises `KernelError`: the module cannot be built or run."""
    q, v = given["q"], given["v"]
    with launch.on(q):
        made = module(cell.name, q.dtype, q.shape[3], v.shape[3], values["backend"], q.get_device())
        made.run(
            function,
            shared=int(q.shape[2] < v.shape[2]),
            stream=launch.stream(q),
            threads=torch.get_num_threads(),
            **given,
        )
