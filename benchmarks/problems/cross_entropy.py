"""Head and cross-entropy with many classes: µs and peak memory above the inputs, hidden states in 16 bits, weight in float32.

The gradient reaches both. `torch` computes the logits and their cross-entropy in float32, as a model without a fused loss
does; `torch linear_cross_entropy` and Liger's function never hold all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module

import torch
import torch.nn.functional as F
from harness import Row, Run, Setting, leaves
from torch import Tensor

from elman_core.nn import linear_cross_entropy

SHAPES = [(16384, 1024, 32_000), (16384, 1024, 150_000), (4096, 2048, 150_000)]


def contenders(
    setting: Setting, shape: tuple[int, int, int]
) -> tuple[dict[str, Callable[[], Run]], dict[str, Callable[[], Run]]]:
    rows, width, classes = shape
    hidden, weight = setting.randn(rows, width), 0.02 * setting.randn(classes, width, dtype=torch.float32)
    targets = torch.randint(classes, (rows,), device=setting.device)
    targets[::7] = -100

    def run(call: Callable[[Tensor, Tensor], Tensor]) -> Run:
        of = leaves(hidden=hidden, weight=weight)
        return Run(lambda: call(*of.values()), of)

    def liger() -> Run:
        function = import_module("liger_kernel.ops.fused_linear_cross_entropy").LigerFusedLinearCrossEntropyFunction
        how = (None, None, -100, 0.0, 0.0, "sum")
        return run(lambda h, w: function.apply(h, w.to(h.dtype), targets, *how)[0])

    def torch_fused() -> Run:
        options = torch.nn.LinearCrossEntropyOptions(allow_retain_graph=True)  # without it, all logits are made
        return run(lambda h, w: F.linear_cross_entropy(h, w.to(h.dtype), targets, reduction="sum", options=options))

    def torch_apart() -> Run:
        return run(lambda h, w: F.cross_entropy((h @ w.to(h.dtype).t()).float(), targets, reduction="sum"))

    ours = {"ours": lambda: run(lambda h, w: linear_cross_entropy(h, w, targets))}
    return ours, {"Liger": liger, "torch linear_cross_entropy": torch_fused, "torch": torch_apart}


def rows(setting: Setting) -> Iterator[Row]:
    for shape in [(16, 8, 5000)] if setting.tiny else SHAPES:
        ours, peers = contenders(setting, shape)
        yield from setting.contest(ours, peers, shape=shape)
        for name, build in {**ours, **(peers if setting.peers else {})}.items():
            if setting.device.type == "cuda" and setting.wants(who=name, shape=shape):
                kind = "ours" if name in ours else "peer"
                yield setting.row(lambda build=build: memory(build()), shape=shape, who=name, kind=kind)  # type: ignore[misc]


def memory(run: Run) -> Row:
    """Peak bytes of one forward and backward above what was allocated before it, the two gradients included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(run.forward(), list(run.leaves.values()))
    return {"peak_mib": round((torch.cuda.max_memory_allocated() - before) / 2**20)}
