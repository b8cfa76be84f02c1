"""The grids of matrix states. B batch, T time, H heads, N rows (keys), V columns (values)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from elman_core.extension import Case
from elman_core.extension import matrix_case as case
from elman_core.extension import matrix_wide as wide

from .problems import CPU, HALF, HOST, Grid, Problems

DTYPES = {"cuda": (torch.float32, *HALF), "host": HOST, "cpu": CPU}


def _ways(cell: Any) -> list[tuple[Any, tuple[str, ...]]]:
    """Every map, every option and all of them, but not every combination."""
    every = (*cell.options, *cell.optional)
    on: list[tuple[str, ...]] = [(), *((n,) for n in every)]
    ways = [(maps, on[i % len(on)]) for i, maps in enumerate(cell.maps)]
    ways += [(maps, each) for maps in (cell.maps[0], cell.maps[-1]) for each in on]
    return list(dict.fromkeys([*ways, (cell.maps[0], every)]))


def cases(cell: Any, target: str, grid: Grid) -> Iterator[Case]:
    """The problems of a grid, and those of some cells."""
    every, blocks = (*cell.options, *cell.optional), target == "cuda" and cell.delta
    many = target == "cuda" and grid == "full" and bool(cell.vectors)
    beside = len(_AT_ONCE) * blocks + many
    for problems in PROBLEMS[target]:
        yield from spread(cell, replace(problems, modules=problems.modules - beside), grid)
    for dtype in (d for d in DTYPES[target] if d.itemsize == 2):
        for rows in (32, 64) if cell.vectors else ():
            yield case((2, 50, 2, rows, rows), dtype, maps=cell.maps[0], wide=wide(cell))
        if many:  # enough heads for a GPU to give each one block
            yield case((41, 33, 4, 128, 128), dtype, maps=cell.maps[0], wide=wide(cell))
        for i, size in enumerate(_AT_ONCE if blocks and grid == "full" else ()):
            words = {"masked": i > 2, "packed": i % 2 == 1}
            yield case((2, 101, 2, *size), dtype, maps=cell.maps[0], on=every, **words)


def spread(cell: Any, problems: Problems, grid: Grid) -> Iterator[Case]:
    """The problems of a grid, in both forms and all ways in turn (on a GPU each kind in one way)."""
    ways, kinds = _ways(cell), dict[Any, int]()
    for i, each in enumerate(problems.cases(grid, cell.name)):
        maps, on = ways[kinds.setdefault(problems.kind(each) if problems.compiled else i, len(kinds)) % len(ways)]
        fused = not cell.shared and (i + i // len(ways)) % 2 == 0
        special = {n: getattr(each, n) for n in ("masked", "strided", "bare")} | dict(each.options)
        yield case(tuple(each.sizes.values()), each.dtype, maps=maps, fused=fused, on=on, **special)


_AT_ONCE = ((64, 256), (96, 256), (128, 192), (36, 20), (72, 65), (124, 3))  # N, V of kernels of sixteen steps at once
# On the host two states, since each is compiled, and none square, which would hide a transposed one.
_HOST = (
    "2x21x2x8x12, 2x1x1x4x3, 2x5x2x4x3 masked, 2x19x3x8x12, 2x33x2x8x12 masked packed, 1x16x2x4x3 strided, "
    "1x18x2x4x3 bare, 2x17x1x8x12 packed, 2x21x2x4x3 masked"
)
PROBLEMS: dict[str, tuple[Problems, ...]] = {
    "host": tuple(
        Problems(
            "BTHNV", (dtype,),
            named=named,
            values={
                "B": (1, 2), "T": (1, 15, 16, 17, 50), "H": (2, 3),
                "NV": ((4, 4), (4, 8), (8, 8), (8, 16), (16, 16), (16, 32)),
            },
            count=30,
        )
        for dtype, named in ((torch.float64, _HOST), (torch.float32, "2x1x1x4x3, 2x5x2x4x3 masked"))
    ),
    "cuda": (
        Problems(
            "BTHNV", DTYPES["cuda"],
            named=(
                "3x1x2x16x16, 2x35x2x16x16 bare, 2x37x3x32x32, 2x40x2x24x48 strided, 2x50x5x32x32 masked, 2x33x3x16x16, "
                "2x33x2x20x7 masked, 2x50x2x64x64 packed, 2x37x3x64x64 masked packed, 1x2049x4x16x16, 4x512x8x32x32"
            ),
            large="1x64x1024x16x16, 1x16385x2x16x16, 64x128x83x32x32, 2x35x2x8x8 bare, 2x37x3x32x32 masked packed",
            values={
                "B": (1, 2, 3), "T": (1, 31, 33, 47, 101), "H": (2, 3, 4, 5),
                "NV": (
                    *((n, n) for n in (4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 48, 56, 64, 80, 96, 128)),
                    (16, 32), (32, 64), (8, 3), (32, 17), (48, 24), *_AT_ONCE,
                ),
            },
            count=324, compiled="NV",
        ),
    ),
    "cpu": (
        Problems(
            "BTHNV", CPU,
            named=(
                "2x37x3x16x24, 2x50x3x32x32 masked packed, 2x21x2x20x7 strided, 1x18x2x64x80 bare packed, 3x1x2x16x24, "
                "2x34x2x20x7 masked packed"
            ),
            values={"B": (1, 2), "T": (15, 17, 65), "H": (2, 3), "NV": ((4, 3), (8, 8), (24, 48), (64, 64), (128, 256))},
            count=30,
        ),
    ),
}  # fmt: skip
STEPS = Problems(
    "BTHNV", DTYPES["cuda"],
    named=(
        "1x1x5x128x256 bare, 64x1x5x128x256, 4x1x2x16x16 masked packed, 250x1x2x16x16 strided, 5x1x3x64x64 masked, "
        "2x1x1x20x7 packed, 300x1x2x12x18 masked packed"
    ),
    values={
        "B": (1, 4, 8, 100), "T": (1,), "H": (1, 3, 5),
        "NV": ((4, 3), (32, 32), (24, 24), (36, 20), (48, 9), (96, 128), (124, 33), (72, 50)),
    },
    count=32, compiled="NV", modules=10,
)  # fmt: skip
"""Of one step: few blocks are narrow, many are wide."""
