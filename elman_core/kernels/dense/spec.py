"""A dense cell, the tensors of its family, and its problems for an emulated GPU.

T time, B batch, d width, U = T + 1. W is (d, d), or has S blocks (n, n) on its diagonal, n = d / S. With tied weights, the
input is the x of u = W silu(x) + b.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from elman_core.kernels.family import Family, Row, Values, flags
from elman_core.kernels.spec import Case, Cell, Inputs

CUDA_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


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
    if cell.bare is not None:
        return TIED
    return BLOCKS if cell.blocks else FAMILY


# Two blocks that exchange the state in a cluster, with and without a mask and documents inside rows.
EMULATED = (
    Case.of("TBd", (35, 3, 128), torch.bfloat16, masked=True, packed=True),
    Case.of("TBd", (9, 11, 128), torch.bfloat16),
)
BLOCK_EMULATED = (Case.of("TBdS", (5, 3, 128, 2), torch.bfloat16, masked=True),)
