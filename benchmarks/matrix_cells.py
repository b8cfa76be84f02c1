"""Time the recurrences of matrix cells beside E88's on one GPU, forward and backward, at 8,192 numbers of state a row.

    python benchmarks/matrix_cells.py [--out benchmarks/results/matrix_cells_h200.json]

Microseconds, medians, as in matrix_state.py; bf16, inputs as `elman verify` draws them. Each kernel runs with the maps that its
variant trains with. over: time / E88's of the same direction and shape. E88 stands there twice: with its maps inside, from
packed projections ("e88 fused": beside E97, which has the same maps), and without ("e88": beside the others).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from elman_e14.op import e14
from elman_e70.op import e70
from elman_e73 import op as e73
from elman_e75.op import e75
from elman_e88.op import e88
from elman_e97.op import e97, e97_raw
from machine import commit, facts
from matrix_state import both_us

from elman_core.kernels import Maps, MatrixKernel
from elman_core.kernels.matrix.spec import case, make_inputs

SHAPES = [(32, 512, 32, 16), (32, 512, 8, 32), (32, 512, 2, 64)]
KERNELS: list[tuple[str, MatrixKernel, Maps | None, bool]] = [  # None: the kernel's first maps
    ("e88", e88, Maps(), False), ("e88 fused", e88, None, True), ("e75", e75, None, False), ("e70", e70, None, False),
    ("e14", e14, None, False), ("e73 column", e73.column, None, False), ("e73 row", e73.row, None, False),
    ("e73 full", e73.full, None, False), ("e73 delta", e73.delta, None, False), ("e97", e97, None, True),
    ("e97 raw", e97_raw, None, True),
]  # fmt: skip


def times(
    kernel: MatrixKernel, maps: Maps | None, packed: bool, shape: tuple[int, int, int, int]
) -> tuple[float, float]:
    B, T, H, N = shape
    problem = case((B, T, H, N, N), torch.bfloat16, maps=maps or kernel.cell.maps[0], packed=packed, bare=True)
    made = make_inputs(kernel.cell, problem, torch.Generator().manual_seed(0))
    inputs = {n: None if x is None else x.cuda() for n, x in made.items()}
    leaves = [x.requires_grad_() for x in inputs.values() if x is not None and x.is_floating_point()]
    call = kernel.spec().call
    return both_us(lambda: call("cuda", inputs, problem.options)["o"], leaves)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "matrix_cells_h200.json")
    parser.add_argument("--commit", default=commit(), help="recorded instead of git's answer")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for shape in SHAPES:
        of: dict[str, tuple[float, float]] = {}
        for name, kernel, maps, packed in KERNELS:
            of[name] = times(kernel, maps, packed, shape)
            beside = of["e88 fused" if packed else "e88"]
            over = [round(x / y, 2) for x, y in zip(of[name], beside, strict=True)]
            row = {
                **dict(zip("BTHN", shape, strict=True)),
                "kernel": name,
                "forward": of[name][0],
                "backward": of[name][1],
            }
            rows.append(row | {"over": over})
            print(shape, name, *of[name], *over, flush=True)
    report = {"what": "matrix cells beside E88, bf16, microseconds (medians)", **facts(options.commit), "rows": rows}
    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
