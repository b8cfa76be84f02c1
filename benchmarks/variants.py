"""Time a training step of variants at about 25M parameters, or dense recurrences beside E1's, on one GPU.

    python benchmarks/variants.py [NAME[:PRESET][@WIDTHxDEPTH]...] [--out benchmarks/results/variants_h200.json] [--size 25M]
    python benchmarks/variants.py --recurrence NAME... [--out benchmarks/results/variants_dense_h200.json]

The step: `training_step.py`'s, as one CUDA graph, of the nearest model of six layers, or of the size in the name. A row
takes the place of the earlier one of its variant; `runs` has the machine of each commit. Without names, the table (.md) alone
is written again.

The recurrence: `dense.py`'s measure, µs a time step of one layer, forward and forward + backward with all gradients, bfloat16,
T = 512, B = 32, three widths; E1 before and after the others shows how much a run wavers.

A file is written after every row; the table beside it last.
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

from elman_core.registry import resolve
from elman_core.size import candidates, parse_parameters

WIDTHS, B, T = (1024, 1536, 2048), 32, 512
DEPTH, WARM, STEPS, REPEATS = 6, 5, 20, 31


def recurrence(name: str) -> dict[str, Any]:
    found = resolve(name)
    kernel = found.variant.branch(0)(64, found.config, 0).kernel  # type: ignore[attr-defined]
    return {"name": name} | {str(d): ours(kernel, T, B, d, torch.bfloat16, REPEATS) for d in WIDTHS}


def sized(name: str, size: str) -> str:
    """NAME[:PRESET]@WIDTHxDEPTH; of a name without a size, the nearest model of DEPTH layers."""
    if "@" in name:
        return name
    found = resolve(name)
    best = candidates(found.variant.name, found.options, parse_parameters(size), depth=DEPTH)[0]
    return f"{name}@{best.width}x{best.depth}"


def step(name: str, size: str, text: Path) -> dict[str, Any]:
    left = torch.cuda.memory_allocated()  # by rows in front
    torch.cuda.reset_peak_memory_stats()
    with trainer(sized(name, size), "graph", B, T, "cuda", text) as made:
        measured = figures(steady(made, WARM, STEPS), B * T)
        measured["peak_gib"] = round(measured["peak_gib"] - left / 2**30, 2)
        return {
            "model": sized(name, size),
            "parameters": sum(p.numel() for p in made.model.parameters()),
            "backend": made.model.model.layers[0].mixer.backend(),
            "ran": made._how()["mode"],
            **measured,
        }


def recurrence_table(found: dict[str, Any]) -> str:
    """Markdown: microseconds with their ratio to E1's."""
    first, *_ = found["rows"]
    rows = [["variant", *(f"d = {d}" for d in WIDTHS)]]
    for row in found["rows"]:
        words = []
        for d in map(str, WIDTHS):
            pairs = [(row[d][way]["median"], first[d][way]["median"]) for way in ("forward", "forward_backward")]
            words.append(" / ".join(f"{us:.2f} ({us / e1:.2f})" for us, e1 in pairs))
        rows.append([row["name"], *words])
    caption = (
        "µs a time step of one layer's recurrence (beside E1's of the same run), forward / forward + backward, bfloat16, "
        f"T = {T}, B = {B}. {found['gpu']}, torch {found['versions']['torch']}, commit {found['commit']}; medians. "
        f"{found.get('note', '')} `benchmarks/variants.py`."
    )
    return f"{caption}\n\n{markdown(rows)}\n"


def step_table(found: dict[str, Any]) -> str:
    rows = [["variant", "model", "parameters", "tok/s", "ms a step", "peak GiB", "runs on", "commit"]]
    for name, row in found["rows"].items():
        words = [row.get("reason", ""), *["–"] * 5]
        if "tok_s" in row:
            words = [row["model"], f"{row['parameters']:,}", f"{row['tok_s']:,}", f"{row['ms']:.1f}"]
            words += [f"{row['peak_gib']:.2f}", row["backend"]]
        rows.append([name, *words, row["commit"][:7]])
    machines = {f"{run['gpu']}, torch {run['versions']['torch'].partition('+')[0]}" for run in found["runs"].values()}
    caption = (
        f"A training step of six layers at about 25M parameters as one CUDA graph, bfloat16, T = {T}, B = {B}; "
        f"{'; '.join(sorted(machines))}; medians. {found['note']} `benchmarks/variants.py`."
    )
    return f"{caption}\n\n{markdown(rows)}\n"


def write(found: dict[str, Any], out: Path) -> None:
    out.write_text(json.dumps(found, indent=1) + "\n")


def recurrences(names: list[str], out: Path, at: str) -> str:
    what = "dense recurrences beside E1's; see the docstring of benchmarks/variants.py"
    found: dict[str, Any] = {"what": what, "B": B, "T": T, **facts(at), "rows": []}
    for name in ("e1", *names, "e1"):
        found["rows"].append(recurrence(name))
        write(found, out)
    return recurrence_table(found)


def steps(names: list[str], out: Path, at: str, size: str) -> str:
    what = "training steps at about 25M parameters; see the docstring of benchmarks/variants.py"
    found: dict[str, Any] = {"what": what, "B": B, "T": T, "note": "", "runs": {}, "rows": {}}
    if out.exists():
        found = json.loads(out.read_text())
    if names:
        found["runs"][at] = facts(at)
    with tempfile.TemporaryDirectory() as folder:
        text = random_text(Path(folder))
        for name in names:
            row = row_of(lambda: step(name, size, text))  # noqa: B023
            found["rows"][name.partition("@")[0]] = {**row, "commit": at}
            print(name, json.dumps(row), flush=True)
            write(found, out)
    return step_table(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--recurrence", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--size", default="25M")
    parser.add_argument("--commit", default=commit())
    given = parser.parse_args()
    os.environ.setdefault("ELMAN_KERNELS", "require")
    out = given.out or RESULTS / f"variants_{'dense_' if given.recurrence else ''}h200.json"
    made = (
        recurrences(given.names, out, given.commit)
        if given.recurrence
        else steps(given.names, out, given.commit, given.size)
    )
    out.with_suffix(".md").write_text(made)
    print(made)


if __name__ == "__main__":
    main()
