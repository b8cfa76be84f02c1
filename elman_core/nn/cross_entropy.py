"""The head and its cross-entropy in one operator, whose backward needs no logits: their gradient overwrites them.

    z = h Wᵀ,   loss = sum_n (log sum_v exp z_nv - z_n,target)
    dz = softmax(z) - onehot(target),   dh = g dz W,   dW = g dzᵀ h

Logits are in the dtype of h, the softmax in float32 (float64 for float64). Separate operators would keep the 16-bit logits,
copy them to float32 and to log-probabilities, and copy those back. Here there is one tensor, read once and written once: on a
GPU by a Triton kernel (cross_entropy_triton.py), elsewhere by plain PyTorch, some rows at a time.

With more than 4,096 classes not even that tensor exists: some rows get their logits, overwrite them with the gradient, and add
it into dh and dW at once. The backward only scales these two. dW is summed in the dtype of W.

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
SOFTMAX = 2**20
"""Numbers of the softmax that exist in float32 at once, in plain PyTorch."""

WIDEST = 4096
"""The most classes whose logits exist all at once."""

LOGITS = 2**26
"""The most logits that exist at once with more classes: 134 MB in 16 bits."""


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
    if weight.shape[0] > WIDEST:
        gradients = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
        return _wide(hidden.flatten(0, -2), weight, targets.flatten(), gradients)[0]
    return _op(hidden.flatten(0, -2), weight.to(hidden.dtype), targets.flatten())[0]


def _run(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """(loss, dz); dz is the memory of the logits."""
    with without_autocast(hidden):
        logits = hidden @ weight.t()
        return _overwrite(logits, targets), logits


def _overwrite(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss; `logits` become their gradient."""
    if logits.is_cuda and logits.dtype != torch.float64 and triton_runs():
        from .cross_entropy_triton import overwrite

        with torch.cuda.device(logits.device):  # Triton launches on the current one
            return overwrite(logits, targets, IGNORED)
    wide = compute_dtype(logits)
    total = torch.zeros((), dtype=wide, device=logits.device)
    rows = max(1, SOFTMAX // logits.shape[1])
    for some, target in zip(logits.split(rows), targets.split(rows), strict=True):
        counts = (target != IGNORED).unsqueeze(1)
        at = target.unsqueeze(1).where(counts, 0)  # any other that is no class stops here, as in torch
        full = some.to(wide)
        normaliser = full.logsumexp(1, keepdim=True)
        total += (normaliser - full.gather(1, at)).masked_fill_(~counts, 0).sum()
        gradient = (full - normaliser).exp_().scatter_add_(1, at, full.new_full((), -1.0).expand_as(at))
        some.copy_(gradient.masked_fill_(~counts, 0))
    return total


def _run_backward(grad: Tensor, d_logits: Tensor, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    with without_autocast(hidden):
        scaled = _scaled(d_logits, grad)
        return scaled @ weight, scaled.t() @ hidden


def _run_wide(hidden: Tensor, weight: Tensor, targets: Tensor, gradients: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, dh, dW); without `gradients` the last two are empty."""
    total, d_hidden, d_weight = _fake_wide(hidden, weight, targets, gradients)
    total.zero_()
    d_weight.zero_()
    with without_autocast(hidden):
        cast = weight.to(hidden.dtype)
        rows = max(1, LOGITS // len(weight))
        memory = hidden.new_empty(min(rows, len(hidden)), len(weight))  # a tensor of each would double it
        for first in range(0, len(hidden), rows):
            some = hidden[first : first + rows]
            logits = torch.mm(some, cast.t(), out=memory[: len(some)])
            total += _overwrite(logits, targets[first : first + rows])
            if not gradients:
                continue
            torch.mm(logits, cast, out=d_hidden[first : first + rows])
            if d_weight.dtype == logits.dtype:
                d_weight.addmm_(logits.t(), some)
            elif logits.is_cuda:  # the product is summed in float32, too, without a tensor of its own
                torch.addmm(d_weight, logits.t(), some, out_dtype=d_weight.dtype, out=d_weight)  # type: ignore[call-overload]
            else:
                d_weight += logits.t() @ some
    return total, d_hidden, d_weight


def _fake_wide(hidden: Tensor, weight: Tensor, _targets: Tensor, gradients: bool) -> tuple[Tensor, Tensor, Tensor]:
    made = [torch.empty_like(t) if gradients else t.new_empty(0) for t in (hidden, weight)]
    return hidden.new_empty((), dtype=compute_dtype(hidden)), made[0], made[1]


def _save_wide(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:  # noqa: ARG001 (by name)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:])


def _differentiate_wide(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, Tensor | None, None, None]:
    if grad is None:
        return None, None, None, None
    d_hidden, d_weight = ctx.saved_tensors
    kept = torch._C._autograd._get_current_graph_task_keep_graph()  # another backward would scale again
    in_place = not kept and d_weight.dtype == grad.dtype and type(d_weight) is Tensor  # a traced one may not be changed
    d_weight = d_weight.mul_(grad) if in_place else _scaled(d_weight, grad)
    return _scaled(d_hidden, grad), d_weight, None, None


def _scaled(gradient: Tensor, by: Tensor) -> Tensor:
    return (gradient.to(by.dtype) * by).to(gradient.dtype)  # 1 / count in 16 bits would scale every gradient


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
_wide = operator(
    "linear_cross_entropy_wide(Tensor hidden, Tensor weight, Tensor targets, bool gradients) -> (Tensor, Tensor, Tensor)",
    _run_wide,
    _fake_wide,
    _save_wide,
    _differentiate_wide,
)
