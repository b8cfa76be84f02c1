"""Which recurrences can track a state? Small models on products of permutations, on a CPU.

Every step shows one element of a group, and the label is the product of all elements so far: for S2 the parity of the bits,
for S3 one of six permutations of three things. One layer of width 64 trains on sequences of 40 steps (AdamW, lr 0.003, 800
steps of 64 sequences). right: the share of correct labels in the last quarter of fresh sequences, of 40 steps as in training
and of 160. Chance is 0.5 and 0.17.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from harness import Row, Setting
from torch import Tensor

from elman_core import LadderConfig, LadderForCausalLM

BATCH, LR = 64, 3e-3
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
    """The share of correct labels in the last quarter of ten batches."""
    with torch.no_grad():
        tests = [drawn(table, length) for _ in range(10)]
        hits = [(model(input_ids=x).logits.argmax(-1) == y)[:, -length // 4 :] for x, y in tests]
    return round(torch.cat(hits).float().mean().item(), 3)


def train(things: int, variant: str, options: dict[str, Any], seed: int, tiny: bool) -> Row:
    torch.manual_seed(seed)
    trained, steps, table = 8 if tiny else 40, 20 if tiny else 800, group(things)
    layers = 2 if variant == "transformer" else 1  # attention, and the SwiGLU after it
    model = LadderForCausalLM(LadderConfig(variant=variant, options=options, hidden_size=64, num_hidden_layers=layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(s / 50, max(0.05, 1 - s / steps)))
    for _ in range(steps):
        shown, labels = drawn(table, trained)
        loss = F.cross_entropy(model(input_ids=shown).logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return {"loss": round(loss.item(), 4), "right": {str(n): right(model, table, n) for n in (trained, 4 * trained)}}


def rows(setting: Setting) -> Iterator[Row]:
    torch.set_num_threads(1)
    models = [("lstm", {})] if setting.tiny else MODELS
    for seed, things, (variant, options) in itertools.product(range(1 if setting.tiny else 2), (2, 3), models):
        if setting.wants(variant=variant):
            yield setting.row(
                lambda t=things, v=variant, o=options, s=seed: train(t, v, o, s, setting.tiny),  # type: ignore[misc]
                group=f"S{things}", variant=variant, options=options, seed=seed, kind="ours",
            )  # fmt: skip
