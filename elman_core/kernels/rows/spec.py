"""The tensors of row recurrences, and their problems for an emulated GPU.

Shapes: B batch, T time, H heads, G = H or 1 heads of q and k, K rows (keys), V columns (values). Options of a case: packed:
documents start in its rows; shared: one head of q and k.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from elman_core.kernels.family import Family, Row, Values, flags
from elman_core.kernels.spec import Case, Cell

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

EMULATED = (case((2, 20, 3, 16, 16), torch.bfloat16, masked=True, packed=True),)
