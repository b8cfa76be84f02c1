"""Where the time of a training step should go, by arithmetic: measured recurrences, and bytes and products for the rest.

    python benchmarks/step_budget.py

To be compared with `training_step.py --targets --profile`, whose tok/s stand below it. The recurrences are those of
results/dense_h200.json and results/matrix_state_h200.json, each timed alone. An H200 is sold with 989 TFLOP/s in bfloat16 and
4.8 TB/s. Assumed: products reach 60 % of the one, passes over memory 79 % of the other, and a kernel inside a graph costs 1 µs
beyond its work.

N tokens of a step, D width of the model, elements N·D of a tensor in the stream's shape.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tables import RESULTS, markdown

PRODUCTS = 0.6 * 989e12
MEMORY = 0.79 * 4.8e12
GAP = 1e-6
ROWS, LENGTH = 32, 512
TOKENS = ROWS * LENGTH


@dataclass(frozen=True)
class Shape:
    """A model with a target.

    Attributes:
        kernel: the recurrence's column in dense_h200.json, all gradients and the product for dW in it; "" of a matrix state.
        products: weights of a layer that meet every token, in forward, gradient of the input and gradient of the weight.
        pointwise: bytes an element of (N, D) that activations, gates and joined gradients move in a layer. spectral: bytes that
            the power iteration of a layer moves. kernels: of a layer.
    """

    name: str
    width: int
    depth: int
    parameters: float
    target: float
    kernel: str
    products: float
    pointwise: float
    spectral: float
    kernels: int


SQUARE = {1280: 1280**2, 1536: 1536**2}
SHAPES = (
    # in_proj to [u, z], w_x, out_proj; 14 passes over W_h in float32; SiLU 4 + 6, joining the gradients of u and z 8 bytes
    Shape("e1@1280x6", 1280, 6, 49.5e6, 750e3, "e1 bf16", 4 * SQUARE[1280], 18, 14 * 4 * SQUARE[1280], 75),
    # in_proj, out_proj: W x and its gradients are in the recurrence, SiLU too (decision 20), which moves 8 bytes more for it
    Shape("e42@1536x6", 1536, 6, 42.9e6, 700e3, "e42 tied bf16", 2 * SQUARE[1536], 8, 14 * 4 * SQUARE[1536], 64),
    # the 32 columns of a_proj read x again, and their gradient is added to that of q, k and v: 2 + 2 + 2 + 6 bytes
    Shape("e88:h32n16@1536x20", 1536, 20, 64.3e6, 600e3, "", 1536 * (1536 + 512 + 32), 12, 0, 30),
)
TARGETED = ("43M", "49M", "64M")
HEADS, STATE = 32, 16
"""Of the matrix state."""


def read(results: Path, name: str) -> Any:
    return json.loads((results / name).read_text())


def recurrence(shape: Shape, results: Path) -> float:
    """Microseconds of a layer, forward and backward, measured."""
    if not shape.kernel:
        found = {(r["B"], r["T"], r["H"], r["N"]): r for r in read(results, "matrix_state_h200.json")["recurrence"]}
        row = found[ROWS, LENGTH, HEADS, STATE]
        return float(row["fused_forward"] + row["fused_backward"])
    dense = {(r["d"], r["B"]): r for r in read(results, "dense_h200.json")["rows"]}
    return float(LENGTH * dense[shape.width, ROWS][shape.kernel]["forward_backward"]["median"])


def measured(shape: Shape, setting: str, results: Path) -> float:
    """tok/s of `elman train`, in the run that has the model's peers beside it."""
    for row in read(results, "training_step_h200.json")["rows"]:
        if (row["model"], row["B"], row["setting"]) == (shape.name, ROWS, setting) and row["size"] in TARGETED:
            return float(row["tok_s"])
    raise ValueError(f"no {setting} row of {shape.name} in training_step_h200.json")


def budget(shape: Shape, results: Path, fused: bool = True) -> dict[str, float]:
    """Milliseconds of every part of a step. fused: add and norm in one kernel, 28 bytes an element; apart they are 76."""
    stream = TOKENS * shape.width
    head = 256 * shape.width
    products = 2 * TOKENS * 3 * (shape.depth * shape.products + head)
    return {
        "recurrence": shape.depth * recurrence(shape, results) / 1e3,
        "products": 1e3 * products / PRODUCTS,
        "add + norm": 1e3 * (shape.depth + 1) * stream * (28 if fused else 76) / MEMORY,
        "pointwise": 1e3 * shape.depth * stream * shape.pointwise / MEMORY,
        "spectral norm": 1e3 * shape.depth * shape.spectral / MEMORY,
        # norm 4, clipping 8, AdamW 28 bytes a weight; casts 6 forward, 6 backward
        "optimizer": 1e3 * shape.parameters * 40 / MEMORY,
        "casts": 1e3 * shape.parameters * 12 / MEMORY,
        "embedding, loss": 1e3 * (TOKENS * 256 * 24 + stream * 12) / MEMORY,
        "between kernels": 1e3 * GAP * (shape.depth * shape.kernels + 60),
    }


def table(results: Path = RESULTS) -> str:
    """The parts, their sum, and what was measured."""
    parts = [budget(shape, results) for shape in SHAPES]
    sums = [sum(p.values()) for p in parts]
    apart = [sum(budget(shape, results, fused=False).values()) for shape in SHAPES]
    rows = [["ms", *(s.name for s in SHAPES)]]
    rows += [[name, *(f"{p[name]:.2f}" for p in parts)] for name in parts[0]]
    rows += [
        ["**step**", *(f"**{s:.1f}**" for s in sums)],
        ["tok/s from this sum", *(f"{TOKENS / s:.0f}K" for s in sums)],
        ["the same with add and norm in separate kernels", *(f"{TOKENS / s:.0f}K" for s in apart)],
    ]
    rows += [
        [f"tok/s measured, {words}", *(f"{measured(s, setting, results) / 1e3:.0f}K" for s in SHAPES)]
        for setting, words in (("graph", "CUDA graph"), ("eager", "eager"))
    ]
    rows.append(["target, tok/s", *(f"{s.target / 1e3:.0f}K" for s in SHAPES)])
    return markdown(rows)


if __name__ == "__main__":
    print(table())
