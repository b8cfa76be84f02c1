"""The tensors of row recurrences, and the problems on which their kernels are verified.

Shapes: B batch, T time, H heads, G = H or 1 heads of q and k, K rows (keys), V columns (values). Options of a case: packed:
documents start in its rows; shared: one head of q and k.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from elman_core.kernels.family import Family, Row, Values, flags
from elman_core.kernels.runtime import CPU_DTYPES
from elman_core.kernels.spec import Case, Cell, Problems

DTYPES = (torch.bfloat16, torch.float16)
_SEGMENT = 16  # steps between saved states, and rows of a share of dw, as in rows.cuh
case = partial(Case.of, "BTHKV")


def _derive(_cell: Cell, sizes: Values, values: Values) -> None:
    """N: of how many steps the states are saved. M: the shares of dw in a head."""
    sizes.setdefault("G", 1 if values.get("shared") else sizes["H"])
    sizes["N"] = (sizes["T"] + _SEGMENT - 1) // _SEGMENT if values.get("keep") else 0
    sizes["M"] = max(sizes["K"] // _SEGMENT, 1)


# q and k of length 1 and W about orthogonal, so that the state neither dies nor explodes. f is from 0.5 to 1.
FAMILY = Family(
    "rows",
    sizes={"B": "batch", "T": "steps", "H": "heads"},
    functions={"forward": "q k v f w last o", "backward": "q k v f w saved dy ds0 dq dk dv df dw"},
    inputs=(
        Row("q", "BTGK", strides="T", read=True, draw=partial(F.normalize, dim=-1)),
        Row("k", "BTGK", strides="T", read=True, draw=partial(F.normalize, dim=-1)),
        Row("v", "BTHV", strides="T", read=True),
        Row("f", "BTH", "compute", read=True, draw=lambda x: 1 - 0.5 * torch.special.ndtr(x) ** 2),
        Row("w", "HVV", takes="stored", read=True, draw=lambda w: 0.9 * torch.linalg.qr(w)[0]),
        Row("S0", "BHKV", "compute", optional=True, given="not bare", draw=lambda s: 0.4 * s),
        *flags("BT"),
    ),
    outputs=(Row("o", "BTHV"), Row("last", "BHKV", "compute")),
    arriving=(Row("dy", "BTHV"), Row("ds1", "BHKV", "compute", optional=True)),
    kept=(Row("saved", "BHNKV", "compute"),),
    gradients=(
        Row("dq", "BTHK"), Row("dk", "BTHK"), Row("dv", "BTHV"), Row("df", "BTH", "compute"), Row("dw", "BHMVV", "compute"),
        Row("ds0", "BHKV", "compute"),
    ),
    numbers="shared stream threads",
    derive=_derive,
)  # fmt: skip

PROBLEMS: dict[Any, Problems] = {
    "cuda": Problems(
        "BTHKV", DTYPES,
        named=(
            "2x37x3x16x16, 2x49x3x16x16 masked packed, 2x37x3x64x16, 2x49x3x64x16 masked packed, 2x37x3x32x32, "
            "2x49x3x32x32 masked packed, 3x1x2x16x16, 2x33x5x64x16 shared, 2x40x2x16x32 strided, 2x48x2x32x16 bare, "
            "1x2049x4x16x16"
        ),
        large="4x512x370x16x16, 1x16384x2x64x16 shared",
        values={
            "B": (2, 3), "T": (1, 2, 15, 16, 17, 31, 63), "H": (3, 7),
            "KV": ((16, 16), (32, 16), (48, 16), (64, 16), (16, 32), (32, 32)),
        },
        words="masked strided bare packed shared", count=42,
    ),
    "cpu": Problems(
        "BTHKV", CPU_DTYPES,
        named=(
            "2x37x3x16x16, 2x49x3x16x16 masked packed, 1x33x2x64x24 shared, 3x1x2x5x7, 2x40x2x16x32 strided bare, "
            "2x34x2x8x40 masked packed"
        ),
        large="1x2049x4x16x16",
        values={"B": (2, 3), "T": (1, 15, 16, 17, 63), "H": (3, 7), "KV": ((16, 16), (64, 16), (5, 7), (16, 32))},
        words="masked strided bare packed shared", count=20,
    ),
}  # fmt: skip
EMULATED = (case((2, 20, 3, 16, 16), torch.bfloat16, masked=True, packed=True),)
