"""Draw benchmarks/results/dense_h200.json (microseconds per step by width at B = 32) and write it as a table in Markdown."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
from readme import of_two_runs

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SERIES = {
    "plain bf16": ("Elman, this package, bf16", "#c0392b", "o-"),
    "e1 bf16": ("E1 (gated), this package, bf16", "#e08e79", "o--"),
    "cuDNN LSTM fp16": ("cuDNN LSTM fp16", "#8e8e8e", "s-"),
    "cuDNN RNN fp16": ("cuDNN RNN fp16", "#5b7fa6", "^-"),
    "cuDNN RNN bf16": ("cuDNN RNN bf16", "#9db8d2", "^--"),
    "cuBLAS per step, CUDA graph, bf16": ("cuBLAS per step in a CUDA graph, bf16", "#4a4a4a", "v-"),
}


COLUMNS = {
    "e1 bf16": "E1 bf16",
    "e42 bf16": "E42 bf16",
    "e42 tied bf16": "E42 with its projection, bf16",
    "plain bf16": "Elman bf16",
    "plain fp16": "Elman fp16",
    "plain fp32": "Elman fp32",
    "cuBLAS per step, CUDA graph, bf16": "cuBLAS per step, CUDA graph, bf16",
    "cuDNN RNN bf16": "cuDNN RNN bf16",
    "cuDNN RNN fp16": "cuDNN RNN fp16",
    "cuDNN LSTM bf16": "cuDNN LSTM bf16",
    "cuDNN LSTM fp16": "cuDNN LSTM fp16",
    "FlashRNN fused bf16": "FlashRNN fused bf16",
}


def table(found: dict[str, Any]) -> str:
    """Forward / forward+backward of every column that was measured."""
    shown = {k: v for k, v in COLUMNS.items() if any(isinstance(r.get(k), dict) for r in found["rows"])}
    lines = ["| d | B | target | " + " | ".join(shown.values()) + " |", "|---" * (3 + len(shown)) + "|"]
    for row in found["rows"]:
        cells = [str(row["d"]), str(row["B"]), "{} / {}".format(*row["target"]) if row["target"] else "–"]
        for name in shown:
            cell = row.get(name)
            if isinstance(cell, dict):
                cells.append(f"{cell['forward']['median']:.2f} / {cell['forward_backward']['median']:.2f}")
            else:
                cells.append("–")
        lines.append("| " + " | ".join(cells) + " |")
    head = f"Microseconds per time step, forward / forward+backward, T = {found['T']}; {found['gpu']}, torch {found['torch']}, "
    head += f"CUDA {found['cuda']}, driver {found['driver']}, commit {found['commit']}, {found['when']}"
    head += f".{of_two_runs(found)}\n\n"
    return head + "\n".join(lines) + "\n"


def main() -> None:
    source = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "results" / "dense_h200.json")
    found = json.loads(source.read_text())
    rows = sorted((r for r in found["rows"] if r["B"] == 32), key=lambda r: r["d"])
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharex=True)
    for axis, key, title in zip(
        axes, ("forward", "forward_backward"), ("forward", "forward + backward, all gradients"), strict=True
    ):
        for name, (label, color, style) in SERIES.items():
            points = [(r["d"], r[name][key]["median"]) for r in rows if isinstance(r.get(name), dict)]
            if points:
                axis.plot(*zip(*points, strict=True), style, color=color, label=label, markersize=4)
        axis.set(title=title, xlabel="width d", xticks=[r["d"] for r in rows], yscale="log")
        axis.grid(alpha=0.3, which="both")
    axes[0].set_ylabel(f"µs per time step (B = 32, T = {found['T']})")
    axes[1].legend(fontsize=7)
    figure.suptitle(f"{found['gpu']}, torch {found['torch']}, commit {found['commit']}", fontsize=8)
    figure.tight_layout()
    source.with_suffix(".md").write_text(table(found))
    figure.savefig(source.with_suffix(".svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
