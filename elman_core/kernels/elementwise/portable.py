"""The elementwise recurrence in plain PyTorch: the obvious loop, and a hand-written backward.

    (h_t, y_t) = step(h_{t-1}, x_t, p)

Every derivative of a step is pointwise, so autograd computes those of all steps at once from the states before them:
J_t = dh_t/dh_{t-1}, and G_t, the gradient of h_{t-1} through y_t. The loop of the backward is only

    r_{t-1} = J_t r_t + G_t,   r_T = dL/dh_T,   dL/dh_0 = r_0

and the gradients of x and p follow from all r_t at once. Computes in float32 (float64 for float64).

Shapes: T time, B batch, d width, S states. J of several states has S x S entries for every channel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from elman_core.kernels.family import Values
from elman_core.kernels.runtime import recording, results, without_autocast

from .spec import ElementwiseCell

Step = Callable[..., tuple[Tensor, ...]]
"""`step(*states, *streams, *vectors) -> (*new states, y)`, for any number of leading dimensions."""


def forward(
    step: Step,
    streams: Sequence[Tensor],
    vectors: Sequence[Tensor],
    h0_SBd: Tensor,
    mask_TB: Tensor | None,
    starts_TB: Tensor | None,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(y (T, B, d), h_T (S, B, d), the states before every step, T of (S, B, d)); autograd differentiates it."""
    h_SBd, outputs = h0_SBd, []
    before: list[Tensor] = []
    for t, x in enumerate(zip(*(x.unbind(0) for x in streams), strict=True)):
        if starts_TB is not None:
            h_SBd = torch.where(starts_TB[t, :, None], 0.0, h_SBd)
        before.append(h_SBd)
        made = step(*h_SBd.unbind(0), *x, *vectors)
        *new, y_Bd = results(step, made, len(h_SBd) + 1, "the new states and y")
        new_SBd = torch.stack(new)
        if mask_TB is not None:
            keep = mask_TB[t, :, None]
            new_SBd = torch.where(keep, new_SBd, h_SBd)
            y_Bd = torch.where(keep, y_Bd, 0.0)
        h_SBd = new_SBd
        outputs.append(y_Bd)
    return torch.stack(outputs), h_SBd, before


def backward(
    step: Step,
    gy_TBd: Tensor,
    g_last_SBd: Tensor,
    streams: Sequence[Tensor],
    vectors: Sequence[Tensor],
    before_TSBd: Tensor,
    mask_TB: Tensor | None,
    starts_TB: Tensor | None,
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """The gradients of the streams, of the vectors and of h_0 (S, B, d)."""
    with recording():
        states = [h.detach().requires_grad_() for h in before_TSBd.unbind(1)]
        inputs = [x.detach().requires_grad_() for x in (*streams, *vectors)]
        *new, y_TBd = step(*states, *inputs)

    def gradients(of: Sequence[Tensor], to: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(of, to, weights, retain_graph=True, materialize_grads=True)

    keep = None if mask_TB is None else mask_TB[:, None, :, None]
    gy_TBd = gy_TBd if mask_TB is None else torch.where(mask_TB[..., None], gy_TBd, 0.0)
    slopes = [torch.stack(gradients([h], states, [torch.ones_like(h)]), 1) for h in new]  # of state i: (T, S, B, d)
    from_y_TSBd = torch.stack(gradients([y_TBd], states, [gy_TBd]), 1)
    if keep is not None:  # a held step: h_t = h_{t-1}
        same = torch.eye(len(new), dtype=gy_TBd.dtype, device=gy_TBd.device)[:, None, :, None, None]
        slopes = [torch.where(keep, j, i) for j, i in zip(slopes, same, strict=True)]
    if starts_TB is not None:  # nothing flows back past the start of a document
        goes_on = ~starts_TB[:, None, :, None]
        from_y_TSBd, *slopes = (torch.where(goes_on, x, 0.0) for x in (from_y_TSBd, *slopes))
    r_SBd, arriving = g_last_SBd, []
    for t in range(len(gy_TBd) - 1, -1, -1):
        arriving.append(r_SBd)
        earlier = from_y_TSBd[t]
        for slope, r_Bd in zip(slopes, r_SBd, strict=True):
            earlier = torch.addcmul(earlier, slope[t], r_Bd)
        r_SBd = earlier
    r_TSBd = torch.stack(arriving[::-1])
    if keep is not None:
        r_TSBd = torch.where(keep, r_TSBd, 0.0)
    found = gradients([y_TBd, *new], inputs, [gy_TBd, *r_TSBd.unbind(1)])
    return list(found[: len(streams)]), list(found[len(streams) :]), r_SBd


def _forward(cell: ElementwiseCell, values: Values) -> tuple[Tensor, Tensor, Tensor]:
    h0 = values["h0"]
    with without_autocast(h0):
        streams = [x.to(h0.dtype) for x in values["stream"]]
        y, last, before = forward(cell.reference, streams, values["vector"], h0, values["mask"], values["starts"])
    checkpoints = torch.stack(before) if values["keep"] else h0.new_empty(0, *h0.shape)
    return y.to(values["stream"][0].dtype), last, checkpoints


def _backward(cell: ElementwiseCell, values: Values) -> tuple[Tensor, Tensor, Tensor]:
    gy, vectors, before = values["gy"], values["vector"], values["checkpoints"]
    wide = [x.to(before.dtype) for x in (gy, *values["stream"])]
    flags = values["mask"], values["starts"]
    dxs, dps, dh0 = backward(cell.reference, wide[0], values["g_last"], wide[1:], vectors, before, *flags)
    dp = torch.stack(dps) if dps else dh0.new_empty(0, gy.shape[2])
    return torch.cat(dxs, -1).to(gy.dtype), dp[:, None], dh0


PLAIN = (_forward, _backward)


def gradients(_cell: ElementwiseCell, values: Values) -> Values:
    """The gradients of the inputs, from the results of a backward: those of rows are added up."""
    # Slices of one tensor: the map that made the streams can take it whole.
    streams = values["dstreams"].split(values["gy"].shape[2], -1)
    return {"stream": streams, "vector": values["dvector"].sum(1).unbind(0), "h0": values["dh0"]}
