"""Where the time of a training step should go, by arithmetic: measured recurrences, and bytes and products for the rest.

    python benchmarks/step_budget.py

A prediction, to be compared with `training_step.py --targets --profile`. From measurements on an H200: the recurrences
(results/dense_h200.md, results/matrix_state_h200.json), a product of 8192³ in bfloat16 (794 TFLOP/s), a copy (4.2 TB/s).
Assumed: products reach 75 % of that, passes over memory 90 %, a kernel inside a graph costs 1 µs beyond its work.

N tokens of a step, D width of the model, elements N·D of a tensor in the stream's shape.
"""

from __future__ import annotations

from dataclasses import dataclass

PRODUCTS = 0.75 * 794e12
MEMORY = 0.9 * 4.2e12
GAP = 1e-6
ROWS, LENGTH = 32, 512
TOKENS = ROWS * LENGTH


@dataclass(frozen=True)
class Shape:
    """A model with a target.

    Attributes:
        recurrence: microseconds of a layer, forward and backward, measured. products: weights of a layer that meet every
            token, in forward, gradient of the input and gradient of the weight. extra: those of a recurrence's own gradient.
        pointwise: bytes an element of (N, D) that activations, gates and joined gradients move in a layer. spectral: bytes that
            the power iteration of a layer moves. kernels: of a layer.
    """

    name: str
    width: int
    depth: int
    parameters: float
    target: float
    recurrence: float
    products: float
    extra: float
    pointwise: float
    spectral: float
    kernels: int


SQUARE = {1280: 1280**2, 1536: 1536**2}
SHAPES = (
    # in_proj to [u, z], w_x, out_proj; 14 passes over W_h in float32; SiLU 4 + 6, joining the gradients of u and z 8 bytes
    Shape(
        "e1@1280x6", 1280, 6, 49.5e6, 750e3, 512 * 2.80, 4 * SQUARE[1280], SQUARE[1280], 18, 14 * 4 * SQUARE[1280], 75
    ),
    # in_proj, out_proj: W x and its gradients are in the recurrence, SiLU too (decision 20), which moves 8 bytes more for it
    Shape(
        "e42@1536x6", 1536, 6, 42.9e6, 700e3, 512 * 3.09, 2 * SQUARE[1536], SQUARE[1536], 8, 14 * 4 * SQUARE[1536], 64
    ),
    # the 32 columns of a_proj read x again, and their gradient is added to that of q, k and v: 2 + 2 + 2 + 6 bytes
    Shape("e88:h32n16@1536x20", 1536, 20, 64.3e6, 600e3, 101.2 + 270.2, 1536 * (1536 + 512 + 32), 0, 12, 0, 30),
)


def budget(shape: Shape, fused: bool = True) -> dict[str, float]:
    """Milliseconds of every part of a step. fused: add and norm in one kernel, 28 bytes an element; apart they are 76."""
    stream = TOKENS * shape.width
    head = 256 * shape.width
    products = 2 * TOKENS * (shape.depth * (3 * shape.products + shape.extra) + 3 * head)
    return {
        "recurrence": shape.depth * shape.recurrence / 1e3,
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


def table() -> str:
    parts = [budget(shape) for shape in SHAPES]
    lines = ["| ms | " + " | ".join(s.name for s in SHAPES) + " |", "|---" * (len(SHAPES) + 1) + "|"]
    lines += [f"| {name} | " + " | ".join(f"{p[name]:.2f}" for p in parts) + " |" for name in parts[0]]
    sums = [sum(p.values()) for p in parts]
    lines.append("| **step** | " + " | ".join(f"**{s:.1f}**" for s in sums) + " |")
    lines.append("| tok/s predicted | " + " | ".join(f"{TOKENS / s:.0f}K" for s in sums) + " |")
    lines.append("| tok/s to reach | " + " | ".join(f"{s.target / 1e3:.0f}K" for s in SHAPES) + " |")
    apart = [sum(budget(s, fused=False).values()) for s in SHAPES]
    lines.append("| with add and norm apart | " + " | ".join(f"{TOKENS / s:.0f}K" for s in apart) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
