"""The dense recurrence in plain PyTorch with a hand-written backward. It runs on a CPU, and on a GPU without a kernel.

    a_t = W h_{t-1} + u_t,   h_t = update(a_t, h_{t-1}, e_t),   y_t = readout(h_t, h_{t-1}, e_t)

The loops contain one product and a few pointwise operations a step. The readout and the pointwise derivatives
D_t = dh_t/da_t and P_t = dh_t/dh_{t-1} are computed for all steps at once. With G_t, the gradient of h_t through y_t, the
backward is

    gh_t = G_t + r_t,   da_t = D_t gh_t,   r_{t-1} = W^T da_t + P_t gh_t,   r_T = dL/dh_T,   dL/dh_0 = r_0

Autograd would record and replay every small operation of every step and add up dW step by step; a compiler would unroll the
loop.

W (S, d / S, d / S) are the blocks of a block-diagonal matrix.

Shapes: T time, B batch, d width. Computes in float32 (float64 for float64); `history` (T+1, B, d) starts with h_0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from elman_core.kernels.family import Values
from elman_core.kernels.runtime import recording, without_autocast

from .spec import DenseCell

LONGEST_SUM = 16384  # places (time steps times rows) of one float32 product


def forward(
    cell: DenseCell,
    u_TBd: Tensor,
    extras: Sequence[Tensor],
    w_dd: Tensor,
    h0_Bd: Tensor,
    mask_TB: Tensor | None,
    starts_TB: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(y (T, B, d), history (T+1, B, d), a (T, B, d)); a is empty for a cell without `update`, where h = a.

    starts_TB: where True, a step begins from 0 instead of the state before it. The history still contains that state.
    """
    update = cell.update
    a_TBd = u_TBd.new_empty(0 if update is None else len(u_TBd), *u_TBd.shape[1:])
    h_Bd = h0_Bd
    w_t = w_dd.mT
    states = [h0_Bd]
    a_s = a_TBd.unbind(0)
    per_step = list(zip(*(e.unbind(0) for e in extras), strict=True)) if extras else [()] * len(u_TBd)
    for t, u_Bd in enumerate(u_TBd.unbind(0)):
        if starts_TB is not None:
            h_Bd = restarted(h_Bd, starts_TB[t])
        out = None if update is None else a_s[t]
        if w_dd.dim() == 3:
            a_Bd = torch.add(u_Bd, block_product(h_Bd, w_dd), out=out)
        else:
            a_Bd = torch.addmm(u_Bd, h_Bd, w_t, out=out)
        new_Bd = a_Bd if update is None else update(a_Bd, h_Bd, *per_step[t])
        h_Bd = new_Bd if mask_TB is None else torch.where(mask_TB[t, :, None], new_Bd, h_Bd)
        states.append(h_Bd)
    history = torch.stack(states)
    y_TBd = cell.readout(history[1:], restarted(history[:-1], starts_TB), *extras)
    if mask_TB is not None:
        y_TBd = torch.where(mask_TB[..., None], y_TBd, 0.0)
    elif y_TBd.untyped_storage().data_ptr() == history.untyped_storage().data_ptr():
        y_TBd = y_TBd.clone()  # y = h: the outputs of an operator may not share memory
    return y_TBd, history, a_TBd


def backward(
    cell: DenseCell,
    gy_TBd: Tensor,
    g_last_Bd: Tensor,
    extras: Sequence[Tensor],
    w_dd: Tensor,
    history: Tensor,
    a_TBd: Tensor,
    mask_TB: Tensor | None,
    starts_TB: Tensor | None,
) -> tuple[Tensor, list[Tensor], Tensor]:
    """(da (T, B, d), the gradients of the extras, dh_0 (B, d))."""
    keep = None if mask_TB is None else mask_TB[..., None]
    if keep is not None:
        gy_TBd = torch.where(keep, gy_TBd, 0.0)
    before = restarted(history[:-1], starts_TB)
    g_h, g_prev, *g_extras = _slopes(cell.readout, (history[1:], before, *extras), gy_TBd)
    slopes_of_update: list[Tensor | None] = [None] * (2 + len(extras))
    if cell.update is not None:
        slopes_of_update = _slopes(cell.update, (a_TBd, before, *extras), torch.ones_like(gy_TBd))
    slope, carry, *e_slopes = slopes_of_update
    if keep is not None:  # a held row: h_t = h_{t-1}
        slope = torch.where(keep, torch.ones_like(gy_TBd) if slope is None else slope, 0.0)
        carry = torch.where(keep, torch.zeros_like(gy_TBd) if carry is None else carry, 1.0)
        e_slopes = [None if s is None else torch.where(keep, s, 0.0) for s in e_slopes]
    # Nothing flows back past the start of a document.
    carry, g_prev = (None if x is None else restarted(x, starts_TB) for x in (carry, g_prev))
    # Becomes gh_t, for all t. A copy: for y = h the gradient of h is the very tensor that the caller passed in.
    total = torch.zeros_like(gy_TBd) if g_h is None else g_h.clone(memory_format=torch.contiguous_format)
    da_TBd = total if slope is None else torch.empty_like(total)
    dh0_Bd = torch.zeros_like(g_last_Bd) if g_prev is None else g_prev[0].clone()
    if g_prev is not None:
        total[:-1] += g_prev[1:]
    total[-1] += g_last_Bd
    totals, deltas = total.unbind(0), da_TBd.unbind(0)
    slopes = None if slope is None else slope.unbind(0)
    carries = None if carry is None else carry.unbind(0)
    for t in reversed(range(len(gy_TBd))):
        if slopes is not None:
            torch.mul(totals[t], slopes[t], out=deltas[t])
        earlier = totals[t - 1] if t else dh0_Bd
        delta = deltas[t] if starts_TB is None else restarted(deltas[t], starts_TB[t])
        if w_dd.dim() == 2:
            earlier.addmm_(delta, w_dd)
        else:
            earlier.add_(block_product(delta, w_dd.mT))
        if carries is not None:
            earlier.addcmul_(carries[t], totals[t])
    d_extras = []
    for e, gradient, s in zip(extras, g_extras, e_slopes, strict=True):
        if s is not None:
            gradient = s * total if gradient is None else gradient + s * total
        d_extras.append(torch.zeros_like(e) if gradient is None else gradient)
    return da_TBd, d_extras, dh0_Bd


def block_product(h: Tensor, w: Tensor) -> Tensor:
    """h Wᵀ for h (B, d) and W (d, d), or (S, d / S, d / S), the blocks of a block-diagonal matrix."""
    if w.dim() == 2:
        return h @ w.T
    return torch.bmm(h.unflatten(-1, (len(w), -1)).transpose(0, 1), w.mT).transpose(0, 1).flatten(1)


def weight_gradient(da: Tensor, before: Tensor, w: Tensor) -> Tensor:
    """The sum of daᵀ h over all places, in the shape and dtype of W; da and h are (places, d)."""
    if w.dim() == 2:
        return product(da.t(), before, w.dtype)
    parts = (x.unflatten(-1, (len(w), -1)).unbind(-2) for x in (da, before))
    return torch.stack([product(a.t(), b, w.dtype) for a, b in zip(*parts, strict=True)])


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b in `dtype`, summed over all places, for the gradient of W. 16-bit factors give a float32 product
    if asked; on a CPU it has been rounded to 16 bits, for which torch has a product that is several times as fast.

    A long float32 sum is split into shorter ones: over 131,072 places in one sum, rounding alone costs 7e-6 of it. Autocast has
    no effect: a backward may be called inside it.
    """
    with without_autocast(a):
        if a.is_cuda and dtype == torch.float32 and a.dtype in (torch.bfloat16, torch.float16):
            return torch.mm(a, b, out_dtype=torch.float32)
        places = b.shape[0]
        if places <= LONGEST_SUM or a.dtype != torch.float32:
            return (a @ b).to(dtype)
        total = a[:, :LONGEST_SUM] @ b[:LONGEST_SUM]
        for first in range(LONGEST_SUM, places, LONGEST_SUM):
            part = slice(first, first + LONGEST_SUM)
            total = torch.addmm(total, a[:, part], b[part])
        return total.to(dtype)


def restarted(h: Tensor, starts: Tensor | None) -> Tensor:
    """h (…, d), 0 where `starts` (…) is True."""
    return h if starts is None else torch.where(starts[..., None], 0.0, h)


def _slopes(function: Callable[..., Tensor], inputs: Sequence[Tensor], weight: Tensor) -> list[Tensor | None]:
    """weight · ∂function/∂input for each input of a pointwise function; None if the function does not depend on it."""
    with recording():
        leaves = [x.detach().requires_grad_() for x in inputs]
        result = function(*leaves)
        return list(torch.autograd.grad(result, leaves, weight, allow_unused=True))


def _forward(cell: DenseCell, values: Values) -> tuple[Tensor, ...]:
    u, h0 = values["u"], values["h0"]
    with without_autocast(u):
        wide, w, *extras = (x.to(h0.dtype) for x in (u, values["w"], *values["extra"]))
        y, history, a = forward(cell, wide, extras, w, h0, values["mask"], values["starts"])
    return y.to(u.dtype), history[-1].clone(), history, a


def _backward(cell: DenseCell, values: Values) -> tuple[Tensor, ...]:
    history, of_extras = values["history"], values["extra"]
    gy, w, *extras = (x.to(history.dtype) for x in (values["gy"], values["w"], *of_extras))
    flags = values["mask"], values["starts"]
    da, dextras, dh0 = backward(cell, gy, values["g_last"], extras, w, history, values["a"], *flags)
    return da, *(d.to(e.dtype) for d, e in zip(dextras, of_extras, strict=True)), dh0


PLAIN = (_forward, _backward)


def gradients(cell: DenseCell, values: Values) -> Values:
    """The gradients of the inputs, from the results of a backward; that of W is one product over all places."""
    da = values["da"]
    found = {"extra": values["dextra"], "h0": values["dh0"]}
    if values["needs"]["w"]:
        multiplied = values["sums"][:-1] if cell.bare else restarted(values["history"][:-1], values["starts"])
        found["w"] = weight_gradient(da.flatten(0, 1), multiplied.flatten(0, 1), values["w"])
    if cell.bare:
        return found | {"x": values["dx"], "b": values["db"]}
    return found | {"u": da.to(values["gy"].dtype)}
