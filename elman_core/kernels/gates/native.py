"""Run gated cells in their compiled modules (`elman/gates_call.h` of `elman_csrc`), on a CPU and on a GPU.

On a GPU, d / 16 blocks hold all of W; each holds 16 channels of every gate. As many groups of blocks as fit take up to 16 rows
of the batch each, and larger batches take several launches. Storage is 16-bit, and sm_90 or newer is needed for the clusters.
"""

from __future__ import annotations

from functools import cache
from math import ceil
from typing import Any

import torch
from torch import Tensor

from elman_core.kernels import build, launch
from elman_core.kernels.build import Extension, Target
from elman_core.kernels.dense.run import TIMEOUT_NS, _device, error_word
from elman_core.kernels.runtime import constant_when_compiled
from elman_core.kernels.spec import Cell
from elman_core.registry.errors import KernelError

DTYPES, CAPABILITY = (torch.bfloat16, torch.float16), (9, 0)
OWNED, _ROWS, STEP, WIDEST = 16, 16, 64, 1024  # channels of a block, rows of a group, what divides d, the widest


def extension(
    cell: Cell, target: Target, dtype: torch.dtype = torch.bfloat16, width: int = 512, rows: int = 8
) -> Extension:
    """What is compiled for a cell: one module for the CPU; for a GPU one for each dtype, width and 8 or 16 rows.

    Raises:
        KernelError: the sources are not installed, or no kernel has this dtype or width.
    """
    name = f"{cell.name}_gates_{target}"
    declared = {"gates": cell.gates, "kept": cell.kept, "states": len(cell.states), "splits": cell.splits}
    declared["staged"] = cell.inner is not None
    if target == "host":
        return build.shipped(name, "gates_host.cpp", cell.header, declared=declared, CELL=cell.type)
    if dtype not in DTYPES:
        raise KernelError(f"{cell.name}: kernels of gated cells store bfloat16 and float16, not {dtype}")
    if width % STEP or width > WIDEST:
        raise KernelError(
            f"{cell.name}: its kernels take widths that are multiples of {STEP} up to {WIDEST}, not {width}"
        )
    tiles = 1 if rows <= 8 else 2
    name += f"_{str(dtype).removeprefix('torch.')}_{width}_{tiles}"
    return build.shipped(
        name, "gates_cuda.cu", cell.header, declared=declared, CELL=cell.type, DTYPE=dtype, WIDTH=width, TILES=tiles
    )


@constant_when_compiled
def is_capable(index: int | None) -> bool:
    """Whether this GPU (None: the current one) runs kernels of gated cells."""
    return torch.cuda.get_device_capability(index) >= CAPABILITY


def rows_of(batch: int, groups: int) -> int:
    """Batch rows of a group: the fewest that need no further launch."""
    return ceil(batch / (groups * ceil(batch / (groups * _ROWS))))


@cache
def settled(cell: Cell, dtype: torch.dtype, batch: int, width: int, index: int | None) -> tuple[Any, int, int]:
    """The module for a problem on the current GPU, the rows of a group, and the number of groups that run together.

    Args:
        index: of the GPU; None for the emulated one.

    Raises:
        KernelError: not supported, it cannot be built, or the GPU does not hold W.
    """
    found = _device(index)
    if found.capability < CAPABILITY:
        raise KernelError(
            f"{cell.name}: its kernels need compute capability 9.0 or newer, not {'.'.join(map(str, found.capability))}"
        )
    groups = found.processors // ceil(width / OWNED)
    while groups:
        rows = rows_of(batch, groups)
        module = launch.opened(extension(cell, "cuda", dtype, width, rows), "gates", index is None)
        held = min(module.ask("capacity", backward) for backward in (0, 1))
        if held >= groups:
            return module, rows, groups
        groups = min(held, groups - 1)
    raise KernelError(f"{cell.name}: this GPU does not hold the {ceil(width / OWNED)} blocks of width {width} together")


def forward(
    cell: Cell, target: Target, u_TBG: Tensor, w_Gd: Tensor, b_G: Tensor | None, states_SBd: Tensor, mask_TB: Tensor | None,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(y (T, B, d), the last states (S, B, d), history (T+1, B, d), memory like it, what the cell keeps (T, B, kept d)).

    memory: s, or inner of a staged cell. Without `keep` the last two are empty; so is the memory of other cells with one state.

    Raises:
        KernelError: the module cannot be built or run, or an earlier launch gave up waiting.
    """
    u_TBG, states_SBd = launch.readable(u_TBG), launch.whole(states_SBd)
    steps, rows, width = u_TBG.shape[0], u_TBG.shape[1], w_Gd.shape[1]
    y_TBd, history = u_TBG.new_empty(steps, rows, width), u_TBG.new_empty(steps + 1, rows, width)
    last_SBd, memory, kept = torch.empty_like(states_SBd), u_TBG.new_empty(0), u_TBG.new_empty(0)
    given: dict[str, Any] = {"h0": states_SBd[0], "last": last_SBd[0], "y": y_TBd, "history": history}
    if len(states_SBd) > 1:
        given |= {"s0": states_SBd[1], "s_last": last_SBd[1]}
    if keep:
        given["kept"] = kept = u_TBG.new_empty(steps, rows, cell.kept * width)
    if cell.inner is not None or (keep and len(states_SBd) > 1):
        given["memory"] = memory = torch.empty_like(history)
    given["bias"] = None if b_G is None else launch.whole(b_G.to(states_SBd.dtype))
    _run(cell, target, "forward", rows, width, u_TBG, w_Gd, mask_TB, **given)
    return y_TBd, last_SBd, history, memory if keep else u_TBG.new_empty(0), kept


def backward(
    cell: Cell, target: Target, gy_TBd: Tensor, g_last_SBd: Tensor, w_Gd: Tensor, history: Tensor, memory: Tensor,
    kept: Tensor, mask_TB: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of u (empty if equal to those of p), of p (T, B, k d), its sums over time, and of the first states."""
    gy_TBd, g_last_SBd = launch.readable(gy_TBd), launch.whole(g_last_SBd)
    steps, rows, width = gy_TBd.shape
    dp, first_SBd = gy_TBd.new_empty(steps, rows, len(w_Gd)), torch.empty_like(g_last_SBd)
    du = torch.empty_like(dp) if cell.splits else dp.new_empty(0)
    dbias_BG = first_SBd.new_empty(rows, len(w_Gd))
    given: dict[str, Any] = {"g_last": g_last_SBd[0], "dh0": first_SBd[0], "dp": dp, "dbias": dbias_BG}
    given |= {"history": history, "kept": kept}
    if len(g_last_SBd) > 1:
        given |= {"g_s_last": g_last_SBd[1], "ds0": first_SBd[1], "memory": memory}
    if cell.splits:
        given["du"] = du
    _run(cell, target, "backward", rows, width, gy_TBd, w_Gd, mask_TB, **given)
    return du, dp, dbias_BG, first_SBd


def _run(
    cell: Cell, target: Target, function: str, rows: int, width: int, main: Tensor, w_Gd: Tensor, mask_TB: Tensor | None,
    **given: Any,
) -> None:  # fmt: skip
    given |= {"main": main, "w": launch.whole(w_Gd), "mask": launch.whole(mask_TB)}
    with launch.on(main):
        if target == "cuda":
            module, each, groups = settled(cell, main.dtype, rows, width, main.device.index)
            given |= {"rows": each, "groups": groups, "timeout_ns": TIMEOUT_NS}
            given |= {"error": error_word(main.device), "stream": launch.stream(main)}
        elif main.dtype in (torch.float32, torch.float64):
            module = _host_module(cell)
        else:
            raise KernelError(f"the host build of {cell.name} runs in float32 and float64, not {main.dtype}")
        module.run(function, **given)


@cache
def _host_module(cell: Cell) -> Any:
    return launch.opened(extension(cell, "host"), "gates")
