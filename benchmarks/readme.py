"""Write the tables of README.md from the committed result files: python benchmarks/readme.py. A test keeps them current."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DENSE_COLUMNS = {
    "e1 bf16": "E1 bf16",
    "e42 bf16": "E42 bf16",
    "cuDNN RNN fp16": "cuDNN RNN fp16",
    "cuDNN LSTM fp16": "cuDNN LSTM fp16",
    "cuBLAS per step, CUDA graph, bf16": "cuBLAS per step in a CUDA graph",
}


def dense_table() -> str:
    """Microseconds per time step, forward / forward and backward, by width and batch."""
    data = json.loads((RESULTS / "dense_h200.json").read_text())
    rows = [["d", "B", *DENSE_COLUMNS.values()]]
    rows += [
        [str(r["d"]), str(r["B"]), *(_pair(r[name]) for name in DENSE_COLUMNS)] for r in data["rows"] if r["d"] <= 2048
    ]
    caption = (
        "Microseconds per time step of one layer's recurrence, forward / forward + backward with all gradients, "
        f"T = {data['T']}, medians; {_machine(data)}. `benchmarks/dense.py`, `benchmarks/results/dense_h200.json`."
    )
    return f"{caption}\n\n{_markdown(rows)}"


def matrix_table() -> str:
    """Microseconds of E88's recurrence for a whole sequence, by shape."""
    data = json.loads((RESULTS / "matrix_state_h200.json").read_text())
    rows = [
        [
            "B",
            "T",
            "heads",
            "n",
            "forward",
            "backward",
            "fused with SiLU, L2 norm and decay",
            "the same in PyTorch around it",
        ]
    ]
    rows += [
        [str(r["B"]), str(r["T"]), str(r["H"]), str(r["N"]), f"{r['forward']:.0f}", f"{r['backward']:.0f}",
         f"{r['fused_forward']:.0f} / {r['fused_backward']:.0f}", f"{r['pieces_forward']:.0f} / {r['pieces_backward']:.0f}"]
        for r in data["recurrence"]
    ]  # fmt: skip
    caption = (
        f"Microseconds of E88's recurrence for all T steps, bf16, medians; {_machine(data)}. "
        "`benchmarks/matrix_state.py`, `benchmarks/results/matrix_state_h200.json`."
    )
    return f"{caption}\n\n{_markdown(rows)}"


def rendered(text: str) -> str:
    """`text` with what stands between `<!-- name -->` and `<!-- /name -->` replaced by the table of that name."""
    for name, table in (("dense", dense_table), ("matrix", matrix_table)):
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"README.md has no marks for the table {name!r}: <!-- {name} --> … <!-- /{name} -->")
        text = pattern.sub(lambda m, t=table: f"{m[1]}{t()}\n{m[2]}", text)
    return text


def _pair(cell: Any) -> str:
    return (
        f"{cell['forward']['median']:.2f} / {cell['forward_backward']['median']:.2f}" if isinstance(cell, dict) else "–"
    )


def _machine(data: dict[str, Any]) -> str:
    return f"one {data['gpu']}, torch {data['torch']}, CUDA {data['cuda']}, commit {data['commit']}"


def _markdown(rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(rendered(readme.read_text()))
