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
    """x (L, m, n) with every singular value of its matrices moved to about 1, in bfloat16: rounds of a Newton-Schulz
    iteration."""
    if x.shape[1] > x.shape[2]:
        return orthogonal(x.mT).mT
    a, b, c = COEFFICIENTS
    x = x.bfloat16()
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(ROUNDS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


@torch.no_grad()
def update(
    params: list[Tensor],
    rows: tuple[int, ...],
    momenta: list[Tensor],
    lr: Tensor,
    beta: float,
    decay: float,
    failed: Tensor | None,
) -> None:
    """One update of parameters of one shape, such as a map in each layer, along their gradients, in place. Their products are
    batches, since one matrix is too small for a GPU.

    `rows` are those of each weight that a parameter stacks; for a parameter (n, rows, columns), of each of its n weights.
    """
    grads = [p.grad for p in params if p.grad is not None]
    new_momenta = torch._foreach_lerp(momenta, grads, 1 - beta)
    ahead = torch.stack(torch._foreach_lerp(grads, new_momenta, beta))
    lr = lr.to(params[0].dtype)
    weights = ahead.flatten(0, -3).split(rows, 1)
    steps = torch.cat([orthogonal(w).to(lr.dtype).mul_(0.2 * max(w.shape[1:]) ** 0.5) for w in weights], 1)
    new = torch._foreach_mul(params, 1 - lr * decay)
    torch._foreach_sub_(new, list(steps.mul_(lr).view_as(ahead).unbind()))
    for old, made in ((params, new), (momenta, new_momenta)):
        kept = made if failed is None else [torch.where(failed > 0, x, y) for x, y in zip(old, made, strict=True)]
        torch._foreach_copy_(old, kept)
