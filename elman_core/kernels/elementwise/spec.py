"""An elementwise cell, the tensors of its family, and its problems for an emulated GPU. T time, B batch, d width.

The option `packed` of a case: documents start inside its rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from elman_core.kernels.family import Family, Row, Values, flags
from elman_core.kernels.spec import Case, Cell

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

EMULATED = (
    Case.of("TBd", (37, 3, 24), torch.bfloat16, masked=True, packed=True),
    Case.of("TBd", (18, 2, 130), torch.bfloat16),
)
