"""Which recurrences can track a state? Small models on products of permutations, on a CPU.

    python benchmarks/state_tracking.py [--out benchmarks/results/state_tracking.json] [--only e88,lstm] [--seeds 2]

Every step shows one element of a group, and the label is the product of all elements so far: for S2 the parity of the bits, for
S3 one of six permutations of three things. One layer of width 64 trains on sequences of 40 steps (AdamW, lr 0.003, 800 steps of
64 sequences). right: the share of right labels in the last quarter of fresh sequences of 40 steps, as trained, and of 160.
Chance is 0.5 and 0.17. Each row is written when it is done, with its commit if that is not the file's; rows that the file
has are not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from machine import commit
from torch import Tensor

from elman_core import LadderConfig, LadderForCausalLM

TRAINED, TESTED, BATCH, STEPS, LR = 40, 160, 64, 800, 3e-3
E88 = {"n_heads": 4, "n_state": 8, "gate_activation": "silu"}
GATE, LINEAR = {"use_write_gate": True}, {"linear_state": True}
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("e88", E88 | LINEAR | GATE), ("e88", E88 | LINEAR | GATE | {"write_scale": 2.0}), ("e88", E88 | LINEAR), ("e88", E88),
    ("e88", E88 | GATE), ("e88", E88 | GATE | {"write_scale": 2.0}), ("gdn", {"n_heads": 4, "head_dim": 8}),
    ("gdn", {"n_heads": 4, "head_dim": 8, "allow_neg_eigval": True}), ("lstm", {}), ("pure", {}), ("e42", {}),
    ("mamba2", {"d_state": 16, "headdim": 32}), ("transformer", {}),
]  # fmt: skip


def group(things: int) -> Tensor:
    """table[a, b]: the permutation a after b, by their numbers."""
    all_of_them = list(itertools.permutations(range(things)))
    return torch.tensor([[all_of_them.index(tuple(a[i] for i in b)) for b in all_of_them] for a in all_of_them])


def drawn(table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """(elements, products so far), each (BATCH, length)."""
    shown = torch.randint(len(table), (BATCH, length))
    products = list(itertools.accumulate(shown.unbind(1), lambda so_far, x: table[x, so_far]))
    return shown, torch.stack(products, 1)


def right(model: Callable[..., Any], table: Tensor, length: int) -> float:
    """The share of right labels in the last quarter of ten batches."""
    with torch.no_grad():
        tests = [drawn(table, length) for _ in range(10)]
        hits = [(model(input_ids=x).logits.argmax(-1) == y)[:, -length // 4 :] for x, y in tests]
    return round(torch.cat(hits).float().mean().item(), 3)


def run(things: int, variant: str, options: dict[str, Any], seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    table = group(things)
    layers = 2 if variant == "transformer" else 1  # attention, and the SwiGLU after it
    model = LadderForCausalLM(LadderConfig(variant=variant, options=options, hidden_size=64, num_hidden_layers=layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(s / 50, max(0.05, 1 - s / STEPS)))
    for _ in range(STEPS):
        shown, labels = drawn(table, TRAINED)
        loss = F.cross_entropy(model(input_ids=shown).logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    found = {str(length): right(model, table, length) for length in (TRAINED, TESTED)}
    return {"loss": round(loss.item(), 4), "right": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "state_tracking.json")
    parser.add_argument("--only", help="variants, with commas")
    parser.add_argument("--seeds", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(1)
    report: dict[str, Any] = {
        "what": str(__doc__).splitlines()[0],
        "torch": torch.__version__,
        "commit": commit(),
        "rows": [],
    }
    if given.out.exists():
        report = json.loads(given.out.read_text())
    for seed, things, (variant, options) in itertools.product(range(given.seeds), (2, 3), MODELS):
        problem = {"group": f"S{things}", "variant": variant, "options": options, "seed": seed}
        if (given.only and variant not in given.only.split(",")) or any(row | problem == row for row in report["rows"]):
            continue
        row = problem | run(things, variant, options, seed)
        row |= {"commit": commit()} if commit() != report["commit"] else {}
        print(row, flush=True)
        report["rows"].append(row)
        given.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
