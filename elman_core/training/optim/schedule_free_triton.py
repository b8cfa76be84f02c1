"""The Triton kernel of `schedule_free.py`: weights, gradient, mean square and base weights read once, three of them written.

Imported on a GPU only.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _update(  # type: ignore[no-untyped-def]
    y, g, v, z, factors, failed, count, beta2, rest, decay, eps, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(failed) == 0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        share, along = tl.load(factors).to(tl.float32), tl.load(factors + 1).to(tl.float32)
        lr, correction = tl.load(factors + 2).to(tl.float32), tl.load(factors + 3).to(tl.float32)
        weight = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
        square = tl.load(v + at, mask=inside, other=0.0).to(tl.float32)
        base = tl.load(z + at, mask=inside, other=0.0).to(tl.float32)
        square = beta2 * square + rest * grad * grad
        n = tl.div_rn(grad, tl.sqrt_rn(tl.div_rn(square, correction)) + eps) + decay * weight
        weight += share * (base - weight) + along * n
        tl.store(v + at, square.to(v.dtype.element_ty), mask=inside)
        tl.store(y + at, weight.to(y.dtype.element_ty), mask=inside)
        tl.store(z + at, (base - lr * n).to(z.dtype.element_ty), mask=inside)


def update(
    y: Tensor, g: Tensor, v: Tensor, z: Tensor, factors: Tensor, failed: Tensor, beta2: float, decay: float, eps: float
) -> None:
    """As `schedule_free.update`, of contiguous tensors; computed in float32."""
    blocks = triton.cdiv(y.numel(), BLOCK)
    _update[(blocks,)](y, g, v, z, factors, failed, y.numel(), beta2, 1 - beta2, decay, eps, BLOCK=BLOCK, num_warps=4)
