"""The grids of recurrences and of the convolution, by target; the sizes are those of their families (`elman_core.kernels`)."""

from __future__ import annotations

import torch

from .problems import CPU, CUDA, HALF, HOST, Problems

Table = dict[str, Problems]

DENSE: Table = {
    "host": Problems(
        "TBd", HOST,
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
        "TBd", CUDA,
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
        "TBd", CPU,
        named="1x3x48, 17x3x70 masked packed, 33x7x40 masked strided, 66x2x130 packed bare",
        large="4096x2x64",
        values={"T": (1, 21, 40), "B": (1, 5, 13), "d": (37, 64, 129, 320)},
        count=20,
    ),
}  # fmt: skip
BLOCKS: Table = {
    "host": Problems(
        "TBdS", HOST,
        named="1x3x10x2, 7x3x15x3, 9x4x10x2 masked, 8x2x20x4 masked strided, 33x2x10x2 strided bare, 9x3x10x2 masked packed",
        values={"T": (1, 21, 40), "B": (2, 32, 70), "dS": ((12, 2), (32, 8))},
        words="masked strided bare", count=6,
    ),
    "cuda": Problems(
        "TBdS", CUDA,
        named=(
            "1x3x128x2, 7x3x192x3, 9x4x128x2 masked, 8x2x256x4 masked strided, 33x2x128x2 strided bare, "
            "9x3x128x2 masked packed"
        ),
        values={"T": (1, 21, 40), "B": (2, 32, 70), "dS": ((4096, 8), (3072, 4), (2048, 2), (2048, 8))},
        words="masked strided bare", count=12,
    ),
    "cpu": Problems(
        "TBdS", CPU,
        named="1x3x150x3, 18x7x150x3 masked packed, 33x2x160x4 strided bare",
        values={"T": (1, 21, 40), "B": (2, 9), "dS": ((120, 2), (256, 8))},
        count=6,
    ),
}  # fmt: skip
GATES: Table = {
    "host": Problems(
        "TBd", HOST,
        named="1x2x4, 7x3x5 masked, 8x2x6 strided, 9x4x7 masked strided, 33x2x3 bare, 9x3x5 masked packed",
        large="2048x1x8",
        values={"T": (1, 2, 50), "B": (1, 5, 33), "d": (2, 3, 4)},
        count=12, wide=8,
    ),
    "cuda": Problems(
        "TBd", HALF,
        named="1x3x64, 33x32x768 masked strided, 64x32x1024, 65x70x256 strided, 129x32x512 bare, 40x19x256 masked packed",
        large="2048x8x256",
        values={"T": (1, 21, 31, 40), "B": (2, 3, 32, 70), "d": (64, 128, 320, 512, 640, 768, 896, 1024)},
        count=80, compiled="d", modules=9,  # some in two ways, for a small batch and a large one
    ),
    "cpu": Problems(
        "TBd", CPU,
        named="1x3x48, 17x3x70 masked packed, 33x7x40 masked strided, 66x2x130 packed bare",
        large="2048x2x64",
        values={"T": (1, 21, 40), "B": (1, 5, 13), "d": (37, 64, 129, 192)},
        count=20,
    ),
}  # fmt: skip
HEADS: Table = {
    "host": Problems("TBHd", (torch.float64,), named="7x3x2x6 masked packed"),
    "cuda": Problems(
        "TBHd", HALF,
        named="17x5x4x768 masked packed",
        values={"T": (1, 40), "B": (70,), "Hd": ((2, 256), (4, 512), (4, 1024), (8, 1024), (2, 2048))},
        count=20, compiled="Hd", modules=3,
    ),
    "cpu": Problems("TBHd", CPU, named="18x7x3x111 masked packed"),
}  # fmt: skip
ELEMENTWISE: Table = {
    "host": Problems(
        "TBd", HOST,
        named="1x2x4, 7x3x5 masked, 9x4x12 masked strided packed, 17x3x8 packed, 33x2x6 strided bare",
        large="16x3x4 masked packed, 4096x1x8",
        values={"T": (1, 2, 16, 65), "B": (1, 3, 33), "d": (2, 7, 32)},
        count=24, wide=16,
    ),
    "cuda": Problems(
        "TBd", CUDA,
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
        "TBd", CPU,
        named="1x2x64, 17x3x70 masked packed, 33x2x200 masked strided, 48x3x130 packed bare",
        large="4096x1x256",
        values={"T": (1, 16, 21, 65), "B": (1, 3, 9), "d": (37, 64, 129, 320)},
        count=20,
    ),
}  # fmt: skip
ROWS: Table = {
    "cuda": Problems(
        "BTHKV", HALF,
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
        "BTHKV", CPU,
        named=(
            "2x37x3x16x16, 2x49x3x16x16 masked packed, 1x33x2x64x24 shared, 3x1x2x5x7, 2x40x2x16x32 strided bare, "
            "2x34x2x8x40 masked packed"
        ),
        large="1x2049x4x16x16",
        values={"B": (2, 3), "T": (1, 15, 16, 17, 63), "H": (3, 7), "KV": ((16, 16), (64, 16), (5, 7), (16, 32))},
        words="masked strided bare packed shared", count=20,
    ),
}  # fmt: skip
CONVOLUTION: Table = {
    "cuda": Problems(
        "TBCK", CUDA,
        named=(
            "131x5x264x4 silu sliced, 67x9x136x4 masked packed bias, 131x3x37x4 silu bias, 1x3x512x4 silu bias, "
            "1x70x40x4 masked, 300x5x520x4 strided silu, 18x5x64x2 bare bias, 64x3x64x7 masked packed silu"
        ),
        large="512x64x3072x4 silu, 512x64x3072x4 masked packed sliced, 4096x2x512x4 silu, 4096x2x512x4 masked packed sliced",
        values={"T": (1, 15, 65, 131), "B": (2, 3, 9), "C": (37, 136, 264), "K": (2, 3, 4, 8, 12)},
        words="masked strided bare packed sliced silu bias", count=24,
    ),
    "cpu": Problems(
        "TBCK", CPU,
        named=(
            "131x5x264x4 silu sliced, 67x9x136x4 masked packed bias, 1x3x37x4 silu bias, 18x5x64x2 bare bias, "
            "64x3x300x7 masked packed silu strided"
        ),
        large="2049x2x512x4 masked packed silu",
        values={"T": (1, 2, 15, 65), "B": (2, 3), "C": (37, 264), "K": (2, 4, 12)},
        words="masked strided bare packed sliced silu bias", count=12,
    ),
}  # fmt: skip
