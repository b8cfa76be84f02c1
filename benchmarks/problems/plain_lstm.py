"""What the ladder adds to torch.nn.LSTM, on two formal languages: the best mean accuracy over tests of 40 to 256 inputs.

Two layers of width 128, AdamW with a rate of 0.002, a tenth of the steps as warm-up, then a cosine to 1e-5; 256 sequences of 3
to 40 inputs a step, the answer at the last; twenty evaluations; a run ends at 0.9995. float32, an embedding N(0, 1) and an
untied head, unless a row says otherwise. --only names rows, as printed, or a task.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from elman_tasks.catalogue import find
from harness import Row, Setting
from torch import Tensor, nn

TASKS = ("cycle_navigation", "modular_arithmetic")
WIDTH, ROWS, RATE, AHEAD = 128, 256, 2e-3, 32
PARTS = {
    "torch.nn.LSTM": "",
    "torch.nn.LSTM, bfloat16": "bf16",
    "residual": "residual",
    "residual, bfloat16": "residual bf16",
    "residual and norms": "residual norm",
    "residual and norms, bfloat16": "residual norm bf16",
    "residual and norms, embedding of 0.02": "residual norm small",
    "residual and norms, orthogonal start": "residual norm orthogonal",
    "residual and norms, a map in front": "residual norm before",
    "residual and norms, a map behind": "residual norm behind",
    "residual and norms, both maps": "residual norm before behind",
    "residual and norms, both maps, orthogonal start": "residual norm before behind orthogonal",
}


class Stack(nn.Module):
    def __init__(self, vocabulary: int, parts: list[str]) -> None:
        super().__init__()
        self.parts = parts
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        if "small" in parts:
            nn.init.normal_(self.embedding.weight, std=0.02)
        self.lstms = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(2))
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) if "norm" in parts else nn.Identity() for _ in range(3))
        self.before = nn.ModuleList(self._map("before") for _ in range(2))
        self.behind = nn.ModuleList(self._map("behind") for _ in range(2))
        self.head = nn.Linear(WIDTH, vocabulary)
        for lstm in self.lstms if "orthogonal" in parts else ():
            for w in lstm.weight_hh_l0.data.split(WIDTH):
                nn.init.orthogonal_(w)
            for w in lstm.weight_ih_l0.data.split(WIDTH):
                nn.init.xavier_uniform_(w)
            nn.init.zeros_(lstm.bias_hh_l0)
            nn.init.zeros_(lstm.bias_ih_l0)
            lstm.bias_ih_l0.data[WIDTH : 2 * WIDTH] = 1.0

    def _map(self, part: str) -> nn.Module:
        return nn.Linear(WIDTH, WIDTH, bias=False) if part in self.parts else nn.Identity()

    def forward(self, tokens_RT: Tensor) -> Tensor:
        x_RTD = self.embedding(tokens_RT)
        for norm, before, lstm, behind in zip(self.norms, self.before, self.lstms, self.behind, strict=False):
            y_RTD = behind(lstm(before(norm(x_RTD)))[0])
            x_RTD = x_RTD + y_RTD if "residual" in self.parts else y_RTD
        logits: Tensor = self.head(self.norms[-1](x_RTD))
        return logits


def rate(step: int, steps: int) -> float:
    warm = max(1, steps // 10)
    if step < warm:
        return RATE * (step + 1) / warm
    return 1e-5 + (RATE - 1e-5) * (1 + math.cos(math.pi * (step - warm) / (steps - warm))) / 2


def trained(setting: Setting, name: str, parts: str, steps: int) -> Row:
    task, device = find(name), setting.device
    torch.manual_seed(0)
    model = Stack(task.vocabulary, parts.split()).to(device)
    rest = [p for n, p in model.named_parameters() if not n.startswith("embedding")]
    groups = [{"params": [model.embedding.weight], "weight_decay": 0.0}, {"params": rest, "weight_decay": 0.01}]
    optimizer, best = torch.optim.AdamW(groups, lr=RATE), 0.0
    lengths, rows = ((8,), 16) if setting.tiny else (task.tests, 512)
    every = max(1, steps // 20)

    def autocast() -> torch.autocast:
        return torch.autocast(device.type, torch.bfloat16, enabled="bf16" in parts and device.type == "cuda")

    for step in range(steps):
        part = step % AHEAD
        if part == 0:
            drawn = task.batch(0, step, range(ROWS), ROWS, AHEAD)
        places = slice(part * ROWS, (part + 1) * ROWS)
        tokens, targets, scored = (
            torch.from_numpy(x[places]).to(device) for x in (drawn.tokens, drawn.targets, drawn.scored)
        )
        with autocast():
            logits = model(tokens.long())
        F.cross_entropy(logits[scored].float(), targets[scored].long()).backward()
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % every == 0:
            right = []
            for length in lengths:
                test = task.test(length, rows)
                with torch.no_grad(), autocast():
                    said = model(torch.from_numpy(test.tokens).to(device).long()).argmax(-1).cpu()
                right.append((said == torch.from_numpy(test.targets))[torch.from_numpy(test.scored)].float().mean())
            best = max(best, float(torch.stack(right).mean()))
            if best > 0.9995:
                break
    return {"best": round(best, 3), "steps": step + 1}


def rows(setting: Setting) -> Iterator[Row]:
    named = dict(list(PARTS.items())[-2:]) if setting.tiny else PARTS
    for name, parts in named.items():
        for task in TASKS:
            if setting.wants(who=name, task=task):
                yield setting.row(
                    lambda t=task, p=parts: trained(setting, t, p, 2 if setting.tiny else 20_000),  # type: ignore[misc]
                    task=task, who=name, kind="ours",
                )  # fmt: skip
