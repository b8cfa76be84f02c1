"""Run elementwise cells in their compiled modules (`elman/elementwise_call.h` of `elman_csrc`), on a CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from elman_core.kernels import build, launch
from elman_core.kernels.build import Extension, Target
from elman_core.kernels.spec import Cell
from elman_core.registry.errors import KernelError

INTERVAL = 16  # steps between the states that a forward on a GPU keeps: kSteps of elementwise_cell.h


def extension(cell: Cell, target: Target, dtype: torch.dtype = torch.bfloat16) -> Extension:
    """What is compiled for a cell: one module for the CPU, and one for each dtype of a GPU. Raises `KernelError` for others."""
    name = f"{cell.name}_elementwise_{target}"
    declared = {"streams": len(cell.streams), "vectors": len(cell.vectors), "states": len(cell.states)}
    if target == "host":
        return build.shipped(name, "elementwise_host.cpp", cell.header, declared=declared, CELL=cell.type)
    if dtype == torch.float64:
        raise KernelError(f"{cell.name}: kernels of a GPU take float32, bfloat16 and float16, not float64")
    name += f"_{str(dtype).removeprefix('torch.')}"
    return build.shipped(name, "elementwise_cuda.cu", cell.header, declared=declared, CELL=cell.type, DTYPE=dtype)


def forward(
    cell: Cell,
    streams: Sequence[Tensor],
    vectors: Sequence[Tensor],
    h0_SBd: Tensor,
    mask_TB: Tensor | None,
    starts_TB: Tensor | None,
    keep: bool,
    target: Target,
) -> tuple[Tensor, Tensor, Tensor]:
    """(y (T, B, d), h_T (S, B, d), the states before steps (n, S, B, d), empty without `keep`).

    Raises:
        KernelError: the module cannot be built or run, or the tensors are on another device than the module.
    """
    first, h0_SBd = streams[0], launch.whole(h0_SBd)
    y_TBd, last_SBd, kept = first.new_empty(*first.shape), torch.empty_like(h0_SBd), h0_SBd.new_empty(0)
    given = {"h0": h0_SBd, "mask": mask_TB, "starts": starts_TB, "y": y_TBd, "last": last_SBd}
    if keep and target == "cuda":
        kept = given["checkpoints"] = h0_SBd.new_empty(-(-len(first) // INTERVAL), *h0_SBd.shape)
    elif keep:
        kept = h0_SBd[None].clone()
    alone = target == "cuda" and len(first) == 1 and not keep  # a step of decoding has its own launch
    _run(cell, target, "step" if alone else "forward", streams, vectors, **given)
    return y_TBd, last_SBd, kept


def backward(
    cell: Cell,
    gy_TBd: Tensor,
    g_last_SBd: Tensor,
    streams: Sequence[Tensor],
    vectors: Sequence[Tensor],
    kept: Tensor,
    mask_TB: Tensor | None,
    starts_TB: Tensor | None,
    target: Target,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the streams in one tensor (T, B, n d), of the vectors (m, d) and of h_0 (S, B, d)."""
    steps, rows, width = gy_TBd.shape
    dstreams = gy_TBd.new_empty(steps, rows, len(streams) * width)
    dvectors, g_last_SBd = g_last_SBd.new_empty(len(vectors), rows, width), launch.whole(g_last_SBd)
    dh0_SBd = torch.empty_like(g_last_SBd)
    states = {"checkpoints": kept} if target == "cuda" else {"h0": kept[0]}
    _run(
        cell, target, "backward", streams, vectors, mask=mask_TB, starts=starts_TB, gy=launch.readable(gy_TBd),
        g_last=g_last_SBd, dstream=dstreams.split(width, -1), dvector=dvectors if vectors else None, dh0=dh0_SBd, **states,
    )  # fmt: skip
    return dstreams, dvectors.sum(1), dh0_SBd


def _run(
    cell: Cell, target: Target, function: str, streams: Sequence[Tensor], vectors: Sequence[Tensor], **given: Any
) -> None:
    first = streams[0]
    given |= {"stream": [launch.readable(x) for x in streams], "vector": [launch.whole(p) for p in vectors]}
    given |= {name: launch.whole(given[name]) for name in ("mask", "starts")}
    with launch.on(first):
        made = module(cell, target, first.dtype, first.device.index)
        made.run(function, cuda_stream=launch.stream(first), **given)


module = launch.opener("elementwise", extension)
