"""A dense cell, the tensors of its family, and the problems on which its kernels are verified.

T time, B batch, d width, U = T + 1. W is (d, d), or has S blocks (n, n) on its diagonal, n = d / S. With tied weights, the
input is the x of u = W silu(x) + b.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from elman_core.kernels.family import Family, Row, Values, flags
from elman_core.kernels.runtime import CPU_DTYPES
from elman_core.kernels.spec import Case, Cell, Inputs, Problems

CUDA_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_HOST_DTYPES = (torch.float64, torch.float32)


@dataclass(frozen=True, eq=False, kw_only=True)
class DenseCell(Cell):
    """`DenseKernel` describes the attributes. bare: of the tied form, the form whose input is u."""

    readout: Callable[..., Tensor]
    update: Callable[..., Tensor] | None = None
    extras: tuple[str, ...] = ()
    uses_a: bool = False
    accumulates: str | None = None
    blocks: bool = False
    bare: DenseCell | None = None

    def adjusted(self, inputs: Inputs, case: Case) -> Inputs:
        if self.accumulates is not None:
            inputs[self.accumulates] -= math.log(case.sizes["T"])
        return super().adjusted(inputs, case)


def _derive(cell: DenseCell, sizes: Values, values: Values) -> None:
    """A: the steps of which a is kept."""
    sizes["U"] = sizes["T"] + 1
    kept = cell.update is not None if values["backend"] == "torch" else cell.uses_a
    sizes["A"] = sizes["T"] if kept else 0
    if "S" in sizes:
        sizes["n"] = sizes["d"] // sizes["S"]


def _family(tied: bool = False, w: str = "dd") -> Family:
    first = "x" if tied else "u"
    return Family(
        "dense",
        sizes={"T": "steps", "B": "batch", "d": "width"},
        functions={
            "forward": f"{first} w h0 history y last", "backward": "gy w history g_last da dh0",
            "forward_step": f"{first} w history y product state", "backward_step": "gy w history da product state",
        },
        inputs=(
            Row(first, "TBd", strides="TB", read=tied),
            Row("extra", "TBd", names="extras", strides="TB", read=True),
            # The largest singular value of a random (d, d) matrix is about 2 sqrt(d): W has norm 0.9 or less.
            Row("w", w, takes="computed", read=True, draw=lambda w: w * (0.45 / w.shape[-1] ** 0.5)),
            *((Row("b", "d", "compute", optional=True),) if tied else ()),
            Row("h0", "Bd", "compute", takes="computed"),
            *flags("TB"),
        ),
        outputs=(Row("y", "TBd"), Row("last", "Bd", "compute")),
        arriving=(Row("gy", "TBd", strides="TB"), Row("g_last", "Bd", "compute")),
        kept=(Row("history", "UBd", "kept"), Row("a", "ABd", "kept"), *((Row("sums", "UBd"),) if tied else ())),
        gradients=(
            Row("da", "TBd", "kept"), Row("dextra", "TBd", names="extras"), Row("dh0", "Bd", "compute"),
            *((Row("dx", "TBd"), Row("db", "d", "compute")) if tied else ()),
        ),
        members=(Row("dbias", "?d", "compute"), Row("product", "Bd", "compute"), Row("state", "Bd", "compute")),
        numbers="error stream rows groups delay timeout_ns slots t threads",
        constants=("str backend",),
        derive=_derive,
    )  # fmt: skip


FAMILY, TIED, BLOCKS = _family(), _family(tied=True), _family(w="Snn")


def family_of(cell: DenseCell) -> Family:
    """The tensors of a cell's kernel."""
    return TIED if cell.bare is not None else BLOCKS if cell.blocks else FAMILY


PROBLEMS: dict[Any, Problems] = {
    "host": Problems(
        "TBd", _HOST_DTYPES,
        named=(
            "1x2x4, 1x3x16, 7x3x5, 7x3x5 masked, 8x2x16 strided, 9x4x12 masked strided, 5x70x8, 6x2x64 bare, 33x2x96, "
            "1001x1x8, 9x3x12 packed, 7x3x5 masked packed"
        ),
        # Odd and tiny widths test indices, which float64 shows exactly.
        large="5x4x1, 21x3x200 strided, 16384x1x8",
        values={"T": (1, 2, 13, 50), "B": (1, 5, 33), "d": (3, 7, 32, 48)},
        count=24, wide=4,
    ),
    "cuda": Problems(
        "TBd", CUDA_DTYPES,
        named=(
            "1x1x512, 17x3x64, 9x5x272 masked, 33x8x768 masked strided, 64x32x1024, 128x70x512 strided, 515x4x512 bare, "
            "40x8x768 masked packed"
        ),
        large="12x512x512, 9x300x1280 masked, 4096x8x256, 65536x2x64",
        values={
            "T": (1, 7, 33, 40), "B": (2, 3, 32, 72),
            "d": (16, 32, 64, 128, 208, 256, 512, 768, 1024, 1280, 1536, 2048, 3072, 4096),
        },
        count=120, compiled="d", modules=11,  # some in two ways, for a small batch and a large one
    ),
    "cpu": Problems(
        "TBd", CPU_DTYPES,
        named="1x3x48, 17x3x70 masked packed, 33x7x40 masked strided, 66x2x130 packed bare",
        large="4096x2x64",
        values={"T": (1, 21, 40), "B": (1, 5, 13), "d": (37, 64, 129, 320)},
        count=20,
    ),
}  # fmt: skip
BLOCK_PROBLEMS: dict[Any, Problems] = {
    "host": Problems(
        "TBdS", _HOST_DTYPES,
        named="1x3x10x2, 7x3x15x3, 9x4x10x2 masked, 8x2x20x4 masked strided, 33x2x10x2 strided bare, 9x3x10x2 masked packed",
        values={"T": (1, 21, 40), "B": (2, 32, 70), "dS": ((12, 2), (32, 8))},
        words="masked strided bare", count=6,
    ),
    "cuda": Problems(
        "TBdS", CUDA_DTYPES,
        named=(
            "1x3x128x2, 7x3x192x3, 9x4x128x2 masked, 8x2x256x4 masked strided, 33x2x128x2 strided bare, "
            "9x3x128x2 masked packed"
        ),
        values={"T": (1, 21, 40), "B": (2, 32, 70), "dS": ((4096, 8), (3072, 4), (2048, 2), (2048, 8))},
        words="masked strided bare", count=12,
    ),
    "cpu": Problems(
        "TBdS", CPU_DTYPES,
        named="1x3x150x3, 18x7x150x3 masked packed, 33x2x160x4 strided bare",
        values={"T": (1, 21, 40), "B": (2, 9), "dS": ((120, 2), (256, 8))},
        count=6,
    ),
}  # fmt: skip
# Two blocks that exchange the state in a cluster, with and without a mask and documents inside rows.
EMULATED = (
    Case.of("TBd", (35, 3, 128), torch.bfloat16, masked=True, packed=True),
    Case.of("TBd", (9, 11, 128), torch.bfloat16),
)
BLOCK_EMULATED = (Case.of("TBdS", (5, 3, 128, 2), torch.bfloat16, masked=True),)
