"""Muon (Jordan et al. 2024), an update for matrices. A CUDA graph can hold it; `torch.optim.Muon` reads its rate on the host.

    M = beta M + (1 - beta) G,    O = orthogonal((1 - beta) G + beta M),    W = W (1 - lr decay) - lr 0.2 sqrt(max(m, n)) O

for a weight W (m, n) with gradient G; 0.2 sqrt(max(m, n)) gives O the size of AdamW's updates, so one learning rate serves both
(Liu et al., Muon is Scalable for LLM Training, 2025). A parameter that stacks several weights is updated weight by weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

COEFFICIENTS, ROUNDS = (3.4445, -4.7750, 2.0315), 5


def orthogonal(x: Tensor) -> Tensor:
    """x (m, n) with every singular value moved to about 1, in bfloat16: rounds of a Newton-Schulz iteration."""
    if x.shape[0] > x.shape[1]:
        return orthogonal(x.mT).mT
    a, b, c = COEFFICIENTS
    x = x.bfloat16()
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(ROUNDS):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


@torch.no_grad()
def update(
    p: Tensor, rows: tuple[int, ...], momentum: Tensor, lr: Tensor, beta: float, decay: float, failed: Tensor | None
) -> None:
    """One update of a matrix along its gradient, in place.

    Args:
        rows: of each weight that p stacks. momentum: M, of the shape of p. lr: a scalar on p's device.
        failed: as of `Optimizer.step`.
    """
    assert p.grad is not None
    new_momentum = momentum.lerp(p.grad, 1 - beta)
    weights = p.grad.lerp(new_momentum, beta).split(rows)
    step = torch.cat([orthogonal(w).to(p.dtype).mul_(0.2 * max(w.shape) ** 0.5) for w in weights])
    lr = lr.to(p.dtype)
    for old, new in ((p, p * (1 - lr * decay) - lr * step), (momentum, new_momentum)):
        old.copy_(new if failed is None else torch.where(failed > 0, old, new))
