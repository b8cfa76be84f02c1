"""The gated recurrence in plain PyTorch: the obvious loop, and a hand-written backward.

    p_t = W h_{t-1} + b,   (h_t, s_t) = step(p_t, u_t, h_{t-1}, s_{t-1}),   y_t = h_t

A step is pointwise, so autograd computes its derivatives for all steps at once, one for each pair of a new state and an input
of the step. The loop of the backward contains one product a step:

    dp_t = Σ_i D_i r_i,   r_j <- Σ_i S_ij r_i  (+ W^T dp_t + dL/dy_{t-1} for h),   r_i: the gradient that arrives at state i

Shapes: T time, B batch, d width, k gates, G = k d, S states, c columns of W. With H heads, c = d / H, and p, u and W have all
gates of a head beside each other. Computes in float32 (float64 for float64).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from elman_core.kernels.dense.portable import block_product, weight_gradient
from elman_core.kernels.elementwise import portable as elementwise
from elman_core.kernels.family import Values
from elman_core.kernels.runtime import recording, results, without_autocast

from .spec import GatesCell

Step = Callable[..., tuple[Tensor, ...]]
"""`step(p, u, *states) -> new states`: p, u are tuples of k tensors; any number of leading dimensions. h is the first state."""


def by_heads(w_Gc: Tensor, width: int) -> Tensor:
    """W as the blocks of the heads, (H, k c, c); with one head as it is."""
    return w_Gc if w_Gc.shape[1] == width else w_Gc.unflatten(0, (width // w_Gc.shape[1], -1))


def each_gate(x: Tensor, gates: int, columns: int) -> tuple[Tensor, ...]:
    """x (…, G) of every gate, k of (…, d)."""
    return tuple(part.flatten(-2) for part in x.unflatten(-1, (-1, gates, columns)).unbind(-2))


def forward(
    step: Step,
    u_TBG: Tensor,
    w_Gc: Tensor,
    b_G: Tensor | None,
    states_SBd: Tensor,
    mask_TB: Tensor | None,
    starts_TB: Tensor | None,
    inner: Callable[..., Tensor] | None = None,
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """(y (T, B, d), last states (S, B, d), the states before every step, p of every step); autograd differentiates it."""
    width, columns = states_SBd.shape[-1], w_Gc.shape[1]
    gates, blocks = len(w_Gc) // width, by_heads(w_Gc, width)
    products: list[Tensor] = []

    def with_product(h_Bd: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        *memory, u_BG = others
        p_BG = block_product(h_Bd, blocks)
        if b_G is not None:
            p_BG = p_BG + b_G
        p, u = (each_gate(x, gates, columns) for x in (p_BG, u_BG))
        if inner is not None:
            bias = None if b_G is None else b_G.chunk(gates)[-1]
            p = (*p[:-1], F.linear(inner(p, u, h_Bd), w_Gc.chunk(gates)[-1], bias))
        products.append(p_BG)
        new = results(step, step(p, u, h_Bd, *memory), 1 + len(memory), "the new states")
        return *new, new[0]

    return *elementwise.forward(with_product, [u_TBG], [], states_SBd, mask_TB, starts_TB), products


def backward(
    step: Step,
    gy_TBd: Tensor,
    g_last_SBd: Tensor,
    u_TBG: Tensor,
    w_Gc: Tensor,
    before_TSBd: Tensor,
    p_TBG: Tensor,
    mask_TB: Tensor | None,
    starts_TB: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of u and p (T, B, k d), and of the first states (S, B, d)."""
    width, columns = g_last_SBd.shape[-1], w_Gc.shape[1]
    gates, blocks = len(w_Gc) // width, by_heads(w_Gc, width)
    with recording():
        states = [h.detach().requires_grad_() for h in before_TSBd.unbind(1)]
        p, u = p_TBG.detach().requires_grad_(), u_TBG.detach().requires_grad_()
        new = step(each_gate(p, gates, columns), each_gate(u, gates, columns), *states)
    slopes = [  # of every new state that is no constant: with respect to u, p and the old states
        torch.autograd.grad([h], [u, p, *states], [torch.ones_like(h)], retain_graph=True, materialize_grads=True)
        if h.requires_grad
        else None
        for h in new
    ]
    r = list(g_last_SBd.unbind(0))
    du, dp = torch.zeros_like(p_TBG), torch.zeros_like(p_TBG)
    for t in range(len(gy_TBd) - 1, -1, -1):
        earlier = [torch.zeros_like(g) for g in r]
        for g, each in zip([r[0] + gy_TBd[t], *r[1:]], slopes, strict=True):
            if each is None:
                continue
            of_u, of_p, *of_states = each
            wide = g.unflatten(-1, (-1, 1, columns)).expand(-1, -1, gates, -1).flatten(1)
            du[t].addcmul_(wide, of_u[t])
            dp[t].addcmul_(wide, of_p[t])
            for before, slope in zip(earlier, of_states, strict=True):
                before.addcmul_(g, slope[t])
        if mask_TB is not None:
            keep = mask_TB[t, :, None]
            for x in (du, dp):
                x[t].masked_fill_(~keep, 0.0)
            earlier = [torch.where(keep, new_r, old) for new_r, old in zip(earlier, r, strict=True)]
        earlier[0] = earlier[0] + block_product(dp[t], blocks.mT)
        if starts_TB is not None:  # nothing flows back past the start of a document
            earlier = [torch.where(starts_TB[t, :, None], 0.0, g) for g in earlier]
        r = earlier
    return du, dp, torch.stack(r)


def _forward(cell: GatesCell, values: Values) -> tuple[Tensor, ...]:
    u, w, b, h0 = (values[name] for name in ("u", "w", "b", "h0"))
    with without_autocast(u):
        y, last, before, products = forward(
            cell.reference, u.to(h0.dtype), w.to(h0.dtype), b, h0, values["mask"], values["starts"], cell.inner
        )
    states, batch, width = h0.shape
    history = h0.new_empty(0, batch, width)
    memory = h0.new_empty(0, batch, max(1, states - 1) * width)
    kept = h0.new_empty(*u.shape[:2], 0)
    if values["keep"]:
        history, *others = (torch.stack(each) for each in zip(*before, last, strict=True))
        memory = torch.cat(others, -1) if others else memory
        kept = torch.stack(products)
    return y.to(u.dtype), last, history, memory, kept


def _backward(cell: GatesCell, values: Values) -> tuple[Tensor, ...]:
    gy, u, w, p = (values[name].to(values["kept"].dtype) for name in ("gy", "u", "w", "kept"))
    others = values["memory"][:-1].chunk(len(cell.states) - 1, -1) if len(cell.states) > 1 else ()
    before = torch.stack([values["history"][:-1], *others], 1)
    du, dp, dh0 = backward(cell.reference, gy, values["g_last"], u, w, before, p, values["mask"], values["starts"])
    return du, dp, dp.sum(0), dh0


PLAIN = (_forward, _backward)


def gradients(cell: GatesCell, values: Values) -> Values:
    """The gradients of the inputs, from the results of a backward; that of W is one product over all steps."""
    du, dp, w, needs = values["du"], values["dp"], values["w"], values["needs"]
    width = len(w) // cell.gates

    def of_rows(dp: Tensor, multiplied: Tensor) -> Tensor:
        made = weight_gradient(dp.flatten(0, 1), multiplied[:-1].flatten(0, 1), by_heads(w, width))
        return made.reshape(-1, w.shape[1])

    dw = None
    if needs["w"] and cell.inner is None:
        dw = of_rows(dp, values["history"])
    elif needs["w"]:
        dw = torch.cat([of_rows(dp[..., :-width], values["history"]), of_rows(dp[..., -width:], values["memory"])])
    db = values["dbias"].sum(0) if needs["b"] else None
    return {"u": (du if du.numel() else dp).to(values["gy"].dtype), "w": dw, "b": db, "h0": values["dh0"]}
