"""Time a training step of several variants at about 25M parameters, and dense recurrences beside E1's, on one GPU.

    python benchmarks/variants.py NAME[:PRESET]... [--out benchmarks/results/variants_dense_h200.json] [--size 25M]

The recurrence: `dense.py`'s measure, µs a time step of one layer, forward and forward + backward with all gradients, bfloat16,
T = 512, B = 32, three widths; E1 before and after the others shows how much a run wavers. The step: `training_step.py`'s, as
one CUDA graph, of the nearest model of six layers. The file is written after every row; the table beside it (.md) last.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from dense import ours
from machine import commit, facts
from tables import RESULTS, markdown
from training_step import figures, random_text, row_of, steady, trainer

from elman_core.experiments.size import candidates, parse_parameters
from elman_core.kernels import DenseKernel
from elman_core.registry import resolve

WIDTHS, B, T = (1024, 1536, 2048), 32, 512
DEPTH, WARM, STEPS, REPEATS = 6, 5, 20, 31


def recurrence(name: str) -> dict[str, Any]:
    found = resolve(name)
    kernel = getattr(found.variant.branch(0)(64, found.config, 0), "kernel", None)
    if not isinstance(kernel, DenseKernel):
        return {"name": name}
    return {"name": name} | {str(d): ours(kernel, T, B, d, torch.bfloat16, REPEATS) for d in WIDTHS}


def step(name: str, size: str, text: Path) -> dict[str, Any]:
    found = resolve(name)
    best = candidates(found.variant.name, found.options, parse_parameters(size), depth=DEPTH)[0]
    left = torch.cuda.memory_allocated()  # by rows in front
    torch.cuda.reset_peak_memory_stats()
    with trainer(f"{name}@{best.width}x{best.depth}", "graph", B, T, "cuda", text) as made:
        measured = figures(steady(made, WARM, STEPS), B * T)
        measured["peak_gib"] = round(measured["peak_gib"] - left / 2**30, 2)
        return {
            "model": f"{name}@{best.width}x{best.depth}",
            "parameters": best.parameters,
            "backend": made.model.model.layers[0].mixer.backend(),
            "ran": made._how()["mode"],
            **measured,
        }


def table(found: dict[str, Any]) -> str:
    """Markdown: microseconds with their ratio to E1's, then the training step."""
    first, *_ = found["rows"]
    widths = [str(d) for d in WIDTHS if str(d) in first]
    head = [
        "variant",
        *(f"d = {d}" for d in widths),
        "model",
        "parameters",
        "tok/s",
        "ms a step",
        "peak GiB",
        "launched as",
    ]
    rows = [head]
    for row in found["rows"]:
        words = []
        for d in widths:
            if d not in row:
                words.append("–")
                continue
            pairs = [(row[d][way]["median"], first[d][way]["median"]) for way in ("forward", "forward_backward")]
            words.append(" / ".join(f"{us:.2f} ({us / e1:.2f})" for us, e1 in pairs))
        trained = row.get("step", {})
        if "tok_s" in trained:
            words += [trained["model"], f"{trained['parameters']:,}", f"{trained['tok_s']:,}", f"{trained['ms']:.1f}"]
            words += [f"{trained['peak_gib']:.2f}", trained["ran"]]
        else:
            words += [trained.get("reason", "–"), *["–"] * 5]
        rows.append([row["name"], *words])
    return markdown(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", metavar="NAME")
    parser.add_argument("--out", type=Path, default=RESULTS / "variants_dense_h200.json")
    parser.add_argument("--size", default="25M")
    parser.add_argument("--commit", default=commit())
    given = parser.parse_args()
    os.environ.setdefault("ELMAN_KERNELS", "require")
    what = "variants: a dense recurrence beside E1's, and a training step; see the docstring of benchmarks/variants.py"
    found: dict[str, Any] = {"what": what, "B": B, "T": T, **facts(given.commit), "rows": []}
    for name in ("e1", *given.names, "e1"):
        found["rows"].append(recurrence(name))
        given.out.write_text(json.dumps(found, indent=1) + "\n")
    with tempfile.TemporaryDirectory() as folder:
        text = random_text(Path(folder))
        for row in found["rows"][:-1]:
            row["step"] = row_of(lambda: step(row["name"], given.size, text))  # noqa: B023
            given.out.write_text(json.dumps(found, indent=1) + "\n")
    caption = (
        f"µs a time step of one layer's recurrence (beside E1's of the same run), forward / forward + backward, bfloat16, "
        f"T = {T}, B = {B}; and a training step of six layers, about {given.size} parameters. {found['gpu']}, "
        f"torch {torch.__version__}, CUDA {torch.version.cuda}, commit {given.commit}; medians. `benchmarks/variants.py`."
    )
    given.out.with_suffix(".md").write_text(f"{caption}\n\n{table(found)}\n")
    print(table(found))


if __name__ == "__main__":
    main()
