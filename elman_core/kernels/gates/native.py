"""Run gated cells in their compiled modules (`elman/gates_call.h` of `elman_csrc`), on a CPU and on a GPU.

On a GPU, d / 16 blocks hold all of W; each holds 16 channels of every gate of a head. As many groups of blocks as fit take up
to 16 rows of the batch each, and larger batches take several launches. Storage is 16-bit, and sm_90 or newer is needed for the
clusters.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from math import ceil
from typing import Any

import torch

from elman_core.kernels import build, launch
from elman_core.kernels.build import Extension, Target
from elman_core.kernels.dense.native import TIMEOUT_NS, _device, error_word
from elman_core.kernels.family import Values
from elman_core.kernels.runtime import constant_when_compiled
from elman_core.kernels.spec import Case
from elman_core.registry.errors import KernelError, KernelUnavailableError

from .spec import FAMILY, GatesCell

DTYPES = (torch.bfloat16, torch.float16)
CAPABILITY = (9, 0)
OWNED = 16  # channels of a block
_ROWS = 16  # of a group
STEP = 64  # divides d
WIDEST = 1024


def extension(
    cell: GatesCell, target: Target, dtype: torch.dtype = torch.bfloat16, width: int = 512, rows: int = 8,
    packed: bool = False, heads: int = 1,
) -> Extension:  # fmt: skip
    """What is compiled for a cell: one module for tests, one for each dtype of a CPU; for a GPU one for each dtype, width,
    number of heads and 8 or 16 rows. packed: for calls with starts of documents.

    Raises:
        KernelError: the sources are not installed, or no kernel has this dtype or width.
    """
    declared = {"gates": cell.gates, "kept": cell.kept, "states": len(cell.states), "splits": cell.splits}
    declared["staged"] = cell.inner is not None
    how: dict[str, Any] = {"header": cell.header, "declared": declared, "CELL": cell.type}
    if target != "host":
        how["DTYPE"] = dtype
    if target != "cuda":
        return build.for_target(f"{cell.name}_gates", "gates", target, **how)
    if dtype not in DTYPES:
        raise KernelError(f"{cell.name}: kernels of gated cells store bfloat16 and float16, not {dtype}")
    each = width // heads
    if width % (STEP * heads) or each > WIDEST:
        of = " a head" if heads > 1 else ""
        raise KernelError(
            f"{cell.name}: its kernels take widths{of} that are multiples of {STEP} up to {WIDEST}, not {width / heads:g}"
        )
    tiles = 1 if rows <= 8 else 2
    words = [str(each), str(tiles)]
    if heads > 1:
        words.append(f"h{heads}")
    if packed:
        words.append("packed")
    how |= {"WIDTH": each, "HEADS": heads, "TILES": tiles, "PACKED": int(packed)}
    return build.for_target(f"{cell.name}_gates", "gates", target, *words, **how)


def module_for(cell: GatesCell, target: Target, case: Case) -> Extension:
    width, batch = case.sizes["d"], case.sizes["B"]
    device = _device(torch.cuda.current_device() if torch.cuda.is_available() else None)
    rows = rows_of(batch, max(1, device.processors // ceil(width / OWNED)))
    packed = target == "cuda" and case.has("packed")
    return extension(cell, target, case.dtype, width, rows, packed, case.sizes.get("H", 1))


@constant_when_compiled
def is_capable(index: int | None) -> bool:
    """Whether this GPU (None: the current one) runs kernels of gated cells."""
    return torch.cuda.get_device_capability(index) >= CAPABILITY


def rows_of(batch: int, groups: int) -> int:
    """Batch rows of a group: the fewest that need no further launch."""
    return ceil(batch / (groups * ceil(batch / (groups * _ROWS))))


@cache
def settled(
    cell: GatesCell, dtype: torch.dtype, batch: int, width: int, index: int | None, packed: bool, heads: int = 1
) -> tuple[Any, int, int]:
    """The module for a problem on the current GPU, the rows of a group, and the number of groups that run together.

    Args:
        index: of the GPU; None for the emulated one. packed: whether documents start inside rows.

    Raises:
        KernelError: not supported, it cannot be built, or the GPU does not hold W.
    """
    found = _device(index)
    if found.capability < CAPABILITY:
        raise KernelUnavailableError(
            f"{cell.name}: its kernels need compute capability 9.0 or newer, not {'.'.join(map(str, found.capability))}"
        )
    groups = found.processors // ceil(width / OWNED)
    while groups:
        rows = rows_of(batch, groups)
        module = launch.opened(extension(cell, "cuda", dtype, width, rows, packed, heads), FAMILY, index is None)
        held = min(module.ask("capacity", backward) for backward in (0, 1))
        if held >= groups:
            return module, rows, groups
        groups = max(0, min(held, groups - 1))
    raise KernelUnavailableError(f"{cell.name}: this GPU does not hold {ceil(width / OWNED)} blocks (width {width})")


def run(cell: GatesCell, function: str, given: Values, values: Values) -> None:
    """As `Operator` calls it. Raises `KernelError`: the module cannot be built or run, or an earlier launch gave up waiting."""
    main = given["u" if function == "forward" else "gy"]
    batch = main.shape[1]
    rows, columns = given["w"].shape
    width = rows // cell.gates
    held: AbstractContextManager[None] = nullcontext()
    with launch.on(main):
        if values["backend"] == "cuda":
            packed = given.get("starts") is not None
            module, rows, groups = settled(cell, main.dtype, batch, width, main.device.index, packed, width // columns)
            given |= {"rows": rows, "groups": groups, "timeout_ns": TIMEOUT_NS}
            given |= {"error": error_word(main.device), "stream": launch.stream(main)}
            held = launch.together(min(groups, ceil(batch / rows)) * (width // OWNED))
        elif values["backend"] == "cpu" or main.dtype in (torch.float32, torch.float64):
            module = _opened(cell, values["backend"], main.dtype, main.device.index)
            given["threads"] = torch.get_num_threads()
        else:
            raise KernelError(f"the host build of {cell.name} runs in float32 and float64, not {main.dtype}")
        with held:
            module.run(function, **given)


_opened = launch.opener(FAMILY, extension)
