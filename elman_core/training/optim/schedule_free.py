"""Schedule-free AdamW in one pass over memory, with its counts on the device: a CUDA graph can hold the whole update.

    v = beta2 v + (1 - beta2) g^2,    n = g / (sqrt(v / (1 - beta2^k)) + eps) + decay y
    c = lr_max^2 / sum of lr_max^2,   y = y + c (z - y) + lr (beta1 (1 - c) - 1) n,   z = z - lr n

in step k = 1, 2, …; y are the weights that are trained, z the base weights, lr_max the largest learning rate so far. The same
function and the same state as `schedulefree.AdamWScheduleFree` (Defazio et al., The Road Less Scheduled, 2024), which keeps the
counts on the host, so it waits for the device to learn whether a step failed, and makes ten passes over memory. Here, a GPU
runs one Triton kernel for each parameter (schedule_free_triton.py); elsewhere, plain PyTorch runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from schedulefree import AdamWScheduleFree
from torch import Tensor

from elman_core.nn.add_norm import FUSED, triton_runs

COUNTS = ("k", "lr", "lr_max", "weight_sum")


class ScheduleFree(AdamWScheduleFree):
    """The package's optimizer with another `step`; of a group, `COUNTS` are scalars on the device, float64.

    Args:
        groups, lr, betas: as of `AdamWScheduleFree`; all parameters are on one device.

    Attributes:
        found_inf: a scalar on the device, or None; where it is above 0 a step changes nothing, as of torch's fused AdamW.
    """

    found_inf: Tensor | None = None

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, lr=lr, betas=betas)
        device = self.param_groups[0]["params"][0].device
        self.counts = torch.zeros(len(COUNTS), len(self.param_groups), dtype=torch.float64, device=device)
        for i, group in enumerate(self.param_groups):
            for row, name in zip(self.counts, COUNTS, strict=True):
                group[name] = row[i].fill_(group[name])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """One update of every parameter that has a gradient; gradients stay. No closure."""
        if closure is not None:
            raise NotImplementedError("no closure: compute the gradient before the step")
        failed = self.counts.new_zeros(()) if self.found_inf is None else self.found_inf
        factors = self._count(failed)
        for group, own in zip(self.param_groups, factors, strict=True):
            numbers = (*group["betas"][1:], group["weight_decay"], group["eps"])
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["z"] = p.clone()
                    state["exp_avg_sq"] = torch.zeros_like(p)
                update(p, p.grad, state["exp_avg_sq"], state["z"], own, failed, *numbers)

    def _count(self, failed: Tensor) -> Tensor:
        """Count a step that has not failed; returns for each group c, the factor of n, lr, and 1 - beta2^k: (G, 4), float64."""
        k, lr, lr_max, total = self.counts
        of_all = self.param_groups[0]
        (beta1, beta2), power = of_all["betas"], of_all["weight_lr_power"]
        k = k + 1
        lr_max = torch.maximum(lr, lr_max)
        weight = lr_max**power
        total = total + weight
        share = torch.where(total > 0, weight / total, 0.0)
        self.counts.copy_(torch.where(failed > 0, self.counts, torch.stack([k, lr, lr_max, total])))
        return torch.stack([share, lr * (beta1 * (1 - share) - 1), lr, 1 - beta2**k], 1)


def update(
    y: Tensor, g: Tensor, v: Tensor, z: Tensor, factors: Tensor, failed: Tensor, beta2: float, decay: float, eps: float
) -> None:
    """One parameter's update in place, unless `failed` is above 0.

    Args:
        y, g, v, z: weights, gradient, mean square and base weights, one shape. factors: (4,), float64, as `_count` gives them.
    """
    if y.is_cuda and y.dtype in FUSED and triton_runs() and all(x.is_contiguous() for x in (y, g, v, z)):
        from . import schedule_free_triton

        with torch.cuda.device(y.device):  # Triton launches on the current one
            schedule_free_triton.update(y, g, v, z, factors, failed, beta2, decay, eps)
        return
    share, along, lr, correction = factors.to(y.dtype)
    new_v = (v * beta2).addcmul_(g, g, value=1 - beta2)
    n = g / (new_v / correction).sqrt_().add_(eps)
    n = n.add_(y, alpha=decay) if decay else n
    new_y = torch.lerp(y, z, share).addcmul_(n, along)
    for old, new in ((v, new_v), (y, new_y), (z, z - lr * n)):
        old.copy_(torch.where(failed > 0, old, new))
