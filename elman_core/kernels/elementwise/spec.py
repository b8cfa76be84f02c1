"""An elementwise cell, the tensors of its family, and the problems on which its kernels are verified. T time, B batch, d width.

The option `packed` of a case: documents start inside its rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from elman_core.kernels.family import Family, Row, Values, flags
from elman_core.kernels.runtime import CPU_DTYPES
from elman_core.kernels.spec import Case, Cell, Problems

INTERVAL = 16  # steps between the states that a forward keeps: kSteps of elementwise_cell.h


@dataclass(frozen=True, eq=False, kw_only=True)
class ElementwiseCell(Cell):
    """`ElementwiseKernel` describes the attributes; the reference is its step."""

    streams: tuple[str, ...]
    vectors: tuple[str, ...]
    states: tuple[str, ...]


def _derive(cell: ElementwiseCell, sizes: Values, values: Values) -> None:
    """N: of how many steps the states before them are kept. W: of all streams. V vectors. R: rows of their gradients."""
    steps, backend = sizes["T"], values["backend"]
    kept = {"torch": steps, "host": 1}.get(backend, (steps + INTERVAL - 1) // INTERVAL)
    sizes["N"] = kept if values.get("keep") else 0
    sizes["W"], sizes["V"] = len(cell.streams) * sizes["d"], len(cell.vectors)
    sizes["R"] = 1 if backend == "torch" else sizes["B"]


FAMILY = Family(
    "elementwise",
    sizes={"T": "steps", "B": "batch", "d": "width"},
    functions={
        "forward": "stream h0 y last", "backward": "stream gy g_last dstream dh0", "step": "stream h0 y last",
    },
    inputs=(
        Row("stream", "TBd", names="streams", strides="TB", read=True),
        # A factor above 1 would make the state or its rounding grow: the comparison would be a matter of luck.
        Row("vector", "d", "compute", names="vectors", read=True, draw=lambda x: 0.9 * torch.tanh(x)),
        Row("h0", "SBd", "compute", names="states", stacked=True),
        *flags("TB"),
    ),
    outputs=(Row("y", "TBd", strides="TB"), Row("last", "SBd", "compute")),
    arriving=(Row("gy", "TBd", strides="TB"), Row("g_last", "SBd", "compute")),
    kept=(Row("checkpoints", "NSBd", "compute"),),
    gradients=(Row("dstreams", "TBW"), Row("dvector", "VRd", "compute"), Row("dh0", "SBd", "compute")),
    members=(
        Row("dstream", "TBd", names="streams", strides="TB"), Row("initial", "Sd", "compute"),
        Row("dinitial", "SBd", "compute"),
    ),
    numbers="early cuda_stream threads",
    derive=_derive,
)  # fmt: skip

PROBLEMS: dict[Any, Problems] = {
    "host": Problems(
        "TBd", (torch.float64, torch.float32),
        named="1x2x4, 7x3x5 masked, 9x4x12 masked strided packed, 17x3x8 packed, 33x2x6 strided bare",
        large="16x3x4 masked packed, 4096x1x8",
        values={"T": (1, 2, 16, 65), "B": (1, 3, 33), "d": (2, 7, 32)},
        count=24, wide=16,
    ),
    "cuda": Problems(
        "TBd", (torch.bfloat16, torch.float16, torch.float32),
        named="1x1x512, 17x3x64 packed, 33x3x272 masked strided, 64x32x1024, 65x70x200 masked packed, 515x4x512 bare",
        # Not many rows of one channel: of one sum that nearly cancels, the relative error is a matter of luck.
        large="1x1x1 masked, 1x200x3 masked, 33x200x3 masked packed, 33x70x7 masked packed, 512x32x1024, 4096x8x256 packed",
        values={
            "T": (1, 16, 21, 31, 48, 129), "B": (3, 32, 70),
            "d": (63, 64, 136, 512, 768, 1024, 1280, 1536, 2048, 4096),
        },
        count=60,
    ),
    "cpu": Problems(
        "TBd", CPU_DTYPES,
        named="1x2x64, 17x3x70 masked packed, 33x2x200 masked strided, 48x3x130 packed bare",
        large="4096x1x256",
        values={"T": (1, 16, 21, 65), "B": (1, 3, 9), "d": (37, 64, 129, 320)},
        count=20,
    ),
}  # fmt: skip
EMULATED = (
    Case.of("TBd", (37, 3, 24), torch.bfloat16, masked=True, packed=True),
    Case.of("TBd", (18, 2, 130), torch.bfloat16),
)
