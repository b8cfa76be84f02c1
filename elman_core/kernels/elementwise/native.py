"""Run elementwise cells in their compiled modules (`elman/elementwise_call.h` of `elman_csrc`), on a CPU and on a GPU."""

from __future__ import annotations

from typing import Any

import torch

from elman_core.kernels import build, launch
from elman_core.kernels.build import Extension, Target
from elman_core.kernels.family import Values
from elman_core.registry.errors import KernelError

from .spec import FAMILY, ElementwiseCell


def extension(cell: ElementwiseCell, target: Target, dtype: torch.dtype = torch.bfloat16) -> Extension:
    """A cell's module for tests ("host"), or one for each dtype of a GPU or CPU. Raises `KernelError` for other dtypes."""
    if target == "cuda" and dtype == torch.float64:
        raise KernelError(f"{cell.name}: kernels of a GPU take float32, bfloat16 and float16, not float64")
    declared = {"streams": len(cell.streams), "vectors": len(cell.vectors), "states": len(cell.states)}
    how: dict[str, Any] = {"header": cell.header, "declared": declared, "CELL": cell.type}
    if target != "host":
        how["DTYPE"] = dtype
    return build.for_target(f"{cell.name}_elementwise", "elementwise", target, **how)


def run(cell: ElementwiseCell, function: str, given: Values, values: Values) -> None:
    """As `Operator` calls it. Raises `KernelError`: the module cannot be built or run."""
    first, backend = given["stream"][0], values["backend"]
    if backend == "host" and "checkpoints" in given:  # it keeps no states, but needs h_0 again
        kept = given.pop("checkpoints")[0]
        if function == "forward":
            kept.copy_(given["h0"])
        else:
            given["h0"] = kept
    if function == "backward":
        given["dstream"] = given.pop("dstreams").split(first.shape[2], -1)
    elif backend == "cuda" and len(first) == 1 and "checkpoints" not in given:
        function = "step"  # of decoding: it has its own launch
    with launch.on(first):
        made = module(cell, backend, first.dtype, first.device.index)
        made.run(function, cuda_stream=launch.stream(first), threads=torch.get_num_threads(), **given)


module = launch.opener(FAMILY, extension)
