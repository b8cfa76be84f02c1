"""The grids of what models decode with. B rows, K inputs, N outputs, D width of a norm, V classes."""

from __future__ import annotations

import torch

from .problems import HALF, Problems

_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64)
SHARED = {
    "linear": Problems(
        "BKN", HALF,
        named=(
            "1x1536x3072 activated, 3x72x40 bias activated strided, 8x2600x17 bias, 13x64x24 strided, "
            "30x1280x256 bias activated, 64x1096x1288 bias, 1x1536x1536 several, 33x72x40 several"
        ),
        large="8x14400x40 bias",  # rows that no block can hold
        values={
            "B": _ROWS,
            "KN": (
                (64, 32), (768, 768), (1000, 77), (1280, 1295), (1536, 3072), (2048, 2048), (4096, 1024), (8192, 264),
            ),
        },
        words="bias activated strided several", count=68,
    ),
    "norm": Problems(
        "BD", (torch.float32, *HALF),
        named="1x1536 adds, 64x1281 adds strided, 5x8192",
        values={"B": (3, 8, 63), "D": (1, 31, 255, 256, 257, 768, 1280, 2048, 4096)},
        words="adds strided", count=18,
    ),
    "draw": Problems(
        "BV", (torch.float32, *HALF),
        named=(
            "64x256, 64x256 penalised greedy, 64x256 top_k top_p, 64x256 penalised top_p, 256x256 top_k top_p each strided, "
            "7x77 penalised top_p"
        ),
        values={"B": (5, 31, 128, 256), "V": (1, 2, 31, 33, 128, 255, 256)},
        words="penalised greedy top_k top_p each strided", count=42,
    ),
}  # fmt: skip
_TINY = "1x40x40 tied bias, 5x72x96 strided, 20x64x64 tied bias strided, 64x40x32 bias, 3x48x48 direct bias strided"
STEP = {
    "host": Problems("BKN", HALF, named=_TINY, values={"B": (2,), "KN": ((24, 16),)}, words="bias", count=2),
    "cuda": Problems(
        "BKN", HALF,
        named=(
            f"{_TINY}, 1x1536x1536 tied bias, 1x1280x1280 bias, 3x1000x1008 bias, 8x768x768 tied bias, 13x1536x1536, "
            "64x1280x1280 tied bias, 8x1280x1280 direct"
        ),
        large="8x7168x7168 tied bias",  # rows that no block can hold
        values={
            "B": _ROWS,
            "KN": ((64, 64), (520, 520), (1536, 1536), (2048, 2048), (264, 1032), (1032, 1032)),
        },
        words="tied direct bias strided", count=68,
    ),
}  # fmt: skip
