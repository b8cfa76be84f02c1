"""The head and its cross-entropy in one operator, whose backward needs no logits: their gradient overwrites them.

    z = h Wᵀ,   loss = sum_n (log sum_v exp z_nv - z_n,target)
    dz = softmax(z) - onehot(target),   dh = g dz W,   dW = g dzᵀ h

Logits are in the dtype of h, the softmax in float32 (float64 for float64). Separate operators would keep the 16-bit logits,
copy them to float32 and to log-probabilities, and copy those back. Here there is one tensor, read once and written once: on a
GPU by a Triton kernel (cross_entropy_triton.py), elsewhere by plain PyTorch, some rows at a time.

Shapes: N targets, D width, V classes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from elman_core.kernels.runtime import operator, transformed

from .add_norm import triton_runs
from .functional import compute_dtype, without_autocast

IGNORED = -100
ROWS = 4096
"""Rows whose softmax exists in float32 at once, in plain PyTorch."""

WIDEST = 4096
"""The most classes that the Triton kernel supports: it keeps a row in registers."""


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The sum over all targets of -log softmax(hidden weightᵀ)[target], in nats; float32 (float64 for float64).

    Args:
        hidden: (..., D), any floating dtype, in which the products are computed. weight: (V, D), no bias.
        targets: (...), int64; -100 is ignored. Any other value that is not a class raises, or on a GPU makes the loss NaN.
    """
    if transformed():
        with without_autocast(hidden):
            logits = (hidden @ weight.to(hidden.dtype).t()).flatten(0, -2)
            return F.cross_entropy(logits.to(compute_dtype(logits)), targets.flatten(), reduction="sum")
    return _op(hidden.flatten(0, -2), weight.to(hidden.dtype), targets.flatten())[0]


def _run(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """(loss, dz); dz is the memory of the logits."""
    with without_autocast(hidden):
        logits = hidden @ weight.t()
        if logits.is_cuda and logits.shape[1] <= WIDEST and logits.dtype != torch.float64 and triton_runs():
            from .cross_entropy_triton import overwrite

            with torch.cuda.device(logits.device):  # Triton launches on the current one
                return overwrite(logits, targets, IGNORED), logits
        return _overwrite(logits, targets), logits


def _overwrite(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss; `logits` become their gradient."""
    wide = compute_dtype(logits)
    total = torch.zeros((), dtype=wide, device=logits.device)
    for some, target in zip(logits.split(ROWS), targets.split(ROWS), strict=True):
        counts = (target != IGNORED).unsqueeze(1)
        at = target.unsqueeze(1).where(counts, 0)  # any other that is no class stops here, as in torch
        full = some.to(wide)
        normaliser = full.logsumexp(1, keepdim=True)
        total += ((normaliser - full.gather(1, at)) * counts).sum()
        gradient = (full - normaliser).exp_().scatter_add_(1, at, full.new_full((), -1.0).expand_as(at)) * counts
        some.copy_(gradient)
    return total


def _run_backward(grad: Tensor, d_logits: Tensor, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    with without_autocast(hidden):
        scaled = (d_logits.to(grad.dtype) * grad).to(d_logits.dtype)  # 1 / count in 16 bits would scale every gradient
        return scaled @ weight, scaled.t() @ hidden


def _fake(hidden: Tensor, weight: Tensor, _targets: Tensor) -> tuple[Tensor, Tensor]:
    return hidden.new_empty((), dtype=compute_dtype(hidden)), hidden.new_empty(hidden.shape[0], weight.shape[0])


def _fake_backward(_grad: Tensor, _d_logits: Tensor, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return hidden.new_empty(hidden.shape), weight.new_empty(weight.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    hidden, weight, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], hidden, weight)


def _differentiate(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, Tensor | None, None]:
    if grad is None:
        return None, None, None
    return (*_backward(grad, *ctx.saved_tensors), None)


_backward = operator(
    "linear_cross_entropy_backward(Tensor grad, Tensor d_logits, Tensor hidden, Tensor weight) -> (Tensor, Tensor)",
    _run_backward,
    _fake_backward,
)
_op = operator(
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor targets) -> (Tensor, Tensor)",
    _run,
    _fake,
    _save,
    _differentiate,
)
