"""A gated cell, the tensors of its family, and the problems on which its kernels are verified.

T time, B batch, d width, H heads, c = d / H, G = k d, S states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from elman_core.kernels.family import Family, Row, Values, flags
from elman_core.kernels.runtime import CPU_DTYPES
from elman_core.kernels.spec import Case, Cell, Problems


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
    step; "torch" keeps p. P: G if du is not dp.
    """
    steps, width, plain, keep = sizes["T"], sizes["d"], values["backend"] == "torch", values.get("keep", True)
    whole = sizes["G"] = cell.gates * width
    sizes["U"] = steps + 1 if keep or not plain else 0  # the blocks of a GPU exchange the state through it
    sizes["M"] = steps + 1 if cell.inner is not None or (keep and len(cell.states) > 1) else 0
    sizes["N"] = max(1, len(cell.states) - 1) * width
    sizes.setdefault("c", width // sizes.get("H", 1))
    sizes["K"] = 0 if not keep else whole if plain else cell.kept * width
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

PROBLEMS: dict[Any, Problems] = {
    "host": Problems(
        "TBd", (torch.float64, torch.float32),
        named="1x2x4, 7x3x5 masked, 8x2x6 strided, 9x4x7 masked strided, 33x2x3 bare, 9x3x5 masked packed",
        large="2048x1x8",
        values={"T": (1, 2, 50), "B": (1, 5, 33), "d": (2, 3, 4)},
        count=12, wide=8,
    ),
    "cuda": Problems(
        "TBd", (torch.bfloat16, torch.float16),
        named="1x3x64, 33x32x768 masked strided, 64x32x1024, 65x70x256 strided, 129x32x512 bare, 40x19x256 masked packed",
        large="2048x8x256",
        values={"T": (1, 21, 31, 40), "B": (2, 3, 32, 70), "d": (64, 128, 320, 512, 640, 768, 896, 1024)},
        count=80, compiled="d", modules=9,  # some in two ways, for a small batch and a large one
    ),
    "cpu": Problems(
        "TBd", CPU_DTYPES,
        named="1x3x48, 17x3x70 masked packed, 33x7x40 masked strided, 66x2x130 packed bare",
        large="2048x2x64",
        values={"T": (1, 21, 40), "B": (1, 5, 13), "d": (37, 64, 129, 192)},
        count=20,
    ),
}  # fmt: skip
HEADS: dict[Any, Problems] = {
    "host": Problems("TBHd", (torch.float64,), named="7x3x2x6 masked packed"),
    "cuda": Problems(
        "TBHd", (torch.bfloat16, torch.float16),
        named="17x5x4x768 masked packed",
        values={"T": (1, 40), "B": (70,), "Hd": ((2, 256), (4, 512), (4, 1024), (8, 1024), (2, 2048))},
        count=20, compiled="Hd", modules=3,
    ),
    "cpu": Problems("TBHd", CPU_DTYPES, named="18x7x3x111 masked packed"),
}  # fmt: skip
EMULATED = (
    Case.of("TBd", (34, 3, 64), torch.bfloat16, masked=True, packed=True),
    Case.of("TBd", (3, 11, 64), torch.bfloat16),
)
EMULATED_HEADS = (Case.of("TBHd", (4, 3, 2, 128), torch.bfloat16, masked=True, packed=True),)
