"""How a dense recurrence is laid over a GPU: a pure function of its shape, its dtype and the device.

W (d, d) is cut into blocks of 64 rows (32 in float32), one per multiprocessor; the P blocks that hold all of W form a group.
The batch is cut into independent tiles of at most 8 rows, and each group takes one or more tiles. In order of preference:

    cluster   P <= 16: a group is a thread-block cluster and exchanges the state through distributed shared memory. One tile a
              group; more groups than fit run one after another.
    grid      the state is exchanged through L2; one tile a group; all blocks resident together.
    tiles     likewise, with several tiles a group: the group works on some while the words of another travel. From four tiles
              on, two form one tile of up to 16 rows ("wide"), which reads W from shared memory half as often.
    steps     W does not fit on the chip: a GEMM and a pointwise kernel for each step, which a CUDA graph can capture.

The shared memory of a block must agree with `Layout` of elman/dense.cuh; the tests compare them on a GPU.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

import torch

from elman_core.registry.errors import KernelError, KernelUnavailableError

Kind = Literal["cluster", "grid", "tiles", "steps"]
MAX_WIDTH, MAX_PLACES, MAX_BATCH = 4096, 2**31 - 1, 65535
_WARPS, _ROWS, _CHUNK, _THREADS = 8, 8, 32, 256
_SPILL = {6: 1, 7: 2, 8: 3}  # chunks of W that do not fit into registers, by the chunks of a warp
_WIDE_SPILL = {1: 0, 2: 0, 3: 0, 4: 0, 5: 2}  # likewise for wide tiles, where they are faster
_LOOK_AFTER = 650  # clocks: an earlier look mostly fails, and costs a round trip


@dataclass(frozen=True)
class Device:
    """What a plan depends on: multiprocessors, the most bytes of shared memory of a block, compute capability."""

    processors: int
    shared_bytes: int
    capability: tuple[int, int]


# The largest GPU of each architecture.
GPUS = {
    "sm_80": Device(108, 163 * 1024, (8, 0)),
    "sm_86": Device(84, 99 * 1024, (8, 6)),
    "sm_89": Device(142, 99 * 1024, (8, 9)),
    "sm_90": Device(132, 227 * 1024, (9, 0)),
    "sm_100": Device(148, 227 * 1024, (10, 0)),
    "sm_120": Device(188, 99 * 1024, (12, 0)),
}


@dataclass(frozen=True)
class Plan:
    """How a launch is laid out.

    Attributes:
        spill: chunks of 32 columns per warp (of 8) that are in shared memory instead of registers.
        rows: batch rows of a tile, up to 8, or 16 if wide = 2. groups: of blocks. parts: blocks of a group.
        delay: clocks before the first look. slots: blocks of a block-diagonal W; each has that many groups.
    """

    kind: Kind
    spill: int = 0
    rows: int = 0
    groups: int = 0
    parts: int = 0
    delay: int = 0
    wide: int = 1
    slots: int = 1

    @property
    def blocks(self) -> int:
        return self.parts * self.groups * self.slots

    def tiles_each(self, batch: int) -> int:
        """The most tiles of a group."""
        return ceil(ceil(batch / self.rows) / self.groups)

    def __str__(self) -> str:
        if self.kind == "steps":
            return "steps: a GEMM and a pointwise kernel each"
        return f"{self.kind}: {self.groups} groups of {self.parts} blocks, tiles of {self.rows} rows"


def plan(
    sizes: Sequence[int], dtype: torch.dtype, device: Device, without: Collection[Kind] = (), slots: int = 1
) -> Plan:
    """The plan for sizes (T, B, d).

    Args:
        without: kinds that turned out not to fit on the device. slots: blocks of W, if it is block-diagonal.

    Raises:
        KernelError: not supported; names what is.
    """
    steps, batch, width = sizes
    if slots > 1:  # each has its share of the device
        owned = 128 // dtype.itemsize
        share = replace(device, processors=device.processors // slots)
        whole = plan((steps, batch, width // slots), dtype, share, {"cluster", *without})
        if whole.kind == "steps" or width // slots % owned:
            raise KernelError(
                f"no persistent launch holds {slots} matrices of {width // slots} x {width // slots} in {dtype}: they must "
                f"be smaller, or multiples of {owned} wide"
            )
        return replace(whole, slots=slots)
    if device.capability < (8, 0):
        raise KernelUnavailableError(
            f"dense kernels need compute capability 8.0 or newer, not {'.'.join(map(str, device.capability))}"
        )
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise KernelError(f"dense kernels store bfloat16, float16 or float32, not {dtype}")
    if width % 16 or not 16 <= width <= MAX_WIDTH:
        raise KernelError(f"dense kernels take widths that are multiples of 16 up to {MAX_WIDTH}, not {width}")
    if batch > MAX_BATCH or steps * batch > MAX_PLACES:
        raise KernelError(f"dense kernels take B ≤ {MAX_BATCH} and T·B ≤ {MAX_PLACES}, not {batch} and {steps * batch}")
    values = 4 // dtype.itemsize  # of a 4-byte word
    parts = ceil(width / (32 * values))
    chunks = ceil(width / (_WARPS * _CHUNK))
    found = None if "cluster" in without else _cluster(batch, parts, device)
    if found is not None and shared_bytes(found, chunks, values, batch) <= device.shared_bytes:
        return found
    groups = device.processors // parts
    if groups == 0 or chunks > max(_SPILL):
        return Plan("steps")
    spill = _SPILL.get(chunks, 0)
    each = ceil(batch / (groups * _ROWS))
    if each == 1:
        rows = ceil(batch / groups)
        found = Plan("grid", spill, rows, ceil(batch / rows), parts, _LOOK_AFTER if chunks > 2 else 0)
    else:
        wide = 2 if each >= 4 and values == 2 and chunks in _WIDE_SPILL else 1
        each = ceil(batch / (groups * _ROWS * wide))
        rows = ceil(batch / (groups * each))
        spill = _WIDE_SPILL[chunks] if wide == 2 else spill + (chunks > 5)
        found = Plan("tiles", spill, rows, ceil(ceil(batch / rows) / each), parts, wide=wide)
    if found.kind in without or shared_bytes(found, chunks, values, batch) > device.shared_bytes:
        return Plan("steps")
    return found


def _cluster(batch: int, parts: int, device: Device) -> Plan | None:
    """The cluster plan, if it is faster: distributed shared memory is the faster exchange for few blocks or few rows."""
    if device.capability < (9, 0) or parts > 16:
        return None
    # A cluster fits inside a group of at least 16 multiprocessors; one is subtracted for incomplete groups.
    together = max(1, device.processors // 16 * (16 // parts) - 1)
    rows = ceil(batch / together)
    if parts == 1:  # nothing to exchange: any number of groups, in any order
        rows = min(rows, _ROWS)
    if rows > (_ROWS if parts <= 12 else 7):
        return None
    return Plan("cluster", 0, rows, ceil(batch / rows), parts)


def shared_bytes(found: Plan, chunks: int, values: int, batch: int) -> int:
    """The dynamic shared memory of a block, in bytes."""
    partial = 2 * _WARPS * _ROWS * found.wide * (32 * values + 4) * 4
    spill = found.spill * _CHUNK * _THREADS * 4
    stage = 0 if values == 2 else _WARPS * _ROWS * found.wide * _CHUNK * 4
    row = chunks * _CHUNK * 4 // values + (64 if values == 2 and chunks % 2 == 0 else 0)
    slots = 2 * _WARPS * _ROWS * row if found.kind == "cluster" else 0
    sums = found.tiles_each(batch) * found.wide * _THREADS * values * 4
    return partial + spill + stage + slots + 2 * _WARPS * 8 + sums
