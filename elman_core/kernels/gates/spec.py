"""A gated cell, the tensors of its family, and its problems for an emulated GPU.

T time, B batch, d width, H heads, c = d / H, G = k d, S states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from elman_core.kernels.family import Family, Row, Values, flags
from elman_core.kernels.spec import Case, Cell


@dataclass(frozen=True, eq=False, kw_only=True)
class GatesCell(Cell):
    """`GatesKernel` describes the attributes; the reference is its step."""

    gates: int
    kept: int
    splits: bool
    inner: Callable[..., Tensor] | None
    states: tuple[str, ...]


def _derive(cell: GatesCell, sizes: Values, values: Values) -> None:
    """U, M: of how many steps h and the other states (or `inner`) are kept, N: numbers of these in a step. K: numbers kept of a
    step; "torch" keeps p. P: G if du is not dp."""
    steps, width, plain, keep = sizes["T"], sizes["d"], values["backend"] == "torch", values.get("keep", True)
    whole = sizes["G"] = cell.gates * width
    sizes["U"] = steps + 1 if keep or not plain else 0  # the blocks of a GPU exchange the state through it
    sizes["M"] = steps + 1 if cell.inner is not None or (keep and len(cell.states) > 1) else 0
    sizes["N"] = max(1, len(cell.states) - 1) * width
    sizes.setdefault("c", width // sizes.get("H", 1))
    kept = whole if plain else cell.kept * width
    sizes["K"] = kept if keep else 0
    sizes["P"] = whole if cell.splits or plain else 0


FAMILY = Family(
    "gates",
    sizes={"T": "steps", "B": "batch", "d": "width", "c": "columns"},
    functions={"forward": "u w h0 y last history", "backward": "gy w history kept g_last dp dbias dh0"},
    inputs=(
        Row("u", "TBG", strides="TB", read="torch"),
        Row("w", "Gc", takes="stored", read=True, draw=lambda w: w * (0.45 / w.shape[1] ** 0.5)),
        Row("b", "G", "compute", optional=True, draw=lambda b: 0.3 * b),
        Row("h0", "SBd", "compute", names="states", stacked=True, draw=lambda h: 0.5 * h),
        *flags("TB"),
    ),
    outputs=(Row("y", "TBd"), Row("last", "SBd", "compute")),
    arriving=(Row("gy", "TBd", strides="TB"), Row("g_last", "SBd", "compute")),
    kept=(Row("history", "UBd", "kept"), Row("memory", "MBN", "kept"), Row("kept", "TBK", "kept")),
    gradients=(
        Row("du", "TBP", "kept"), Row("dp", "TBG", "kept"), Row("dbias", "BG", "compute"), Row("dh0", "SBd", "compute"),
    ),
    numbers="error stream rows groups timeout_ns threads",
    derive=_derive,
)  # fmt: skip

EMULATED = (
    Case.of("TBd", (34, 3, 64), torch.bfloat16, masked=True, packed=True),
    Case.of("TBd", (3, 11, 64), torch.bfloat16),
)
EMULATED_HEADS = (Case.of("TBHd", (4, 3, 2, 128), torch.bfloat16, masked=True, packed=True),)
