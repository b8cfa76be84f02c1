"""`elman::gates_NAME` and its backward: the recurrence as an operator of `torch.library`, on each back end.

Shapes: T time, B batch, d width, G = k d, S states.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from elman_core.kernels.dense.portable import product
from elman_core.kernels.runtime import operator, tensors, without_autocast
from elman_core.kernels.spec import Cell

from . import native, portable


class Recurrence:
    """The operator of one cell, `op(u, w, b, h0, mask, starts, keep, backend)`, and its derivative.

    keep: whether a backward will follow. Outputs: y (T, B, d), the last states (S, B, d), and three tensors for the backward:
    for "torch" the states before every step (T, S, B, d), p of every step (T, B, G) and an empty one; otherwise those of
    `native.forward`.
    """

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        end = "Tensor? mask, Tensor? starts"
        self._backward = operator(
            f"gates_{cell.name}_backward(Tensor gy, Tensor g_last, Tensor? u, Tensor w, Tensor k0, Tensor k1, Tensor k2, {end},"
            f" str backend) -> {tensors(4)}",
            self._run_backward,
            self._fake_backward,
        )
        self.op = operator(
            f"gates_{cell.name}(Tensor u, Tensor w, Tensor? b, Tensor h0, {end}, bool keep, str backend) -> {tensors(5)}",
            self._run_forward,
            self._fake_forward,
            self._save,
            self._differentiate,
        )

    def _run_forward(
        self, u: Tensor, w: Tensor, b: Tensor | None, h0: Tensor, mask: Any, starts: Any, keep: bool, backend: Any
    ) -> tuple[Tensor, ...]:
        if backend != "torch":
            return native.forward(self.cell, backend, u, w.to(u.dtype), b, h0, mask, keep)
        with without_autocast(u):
            wide = b if b is None else b.to(h0.dtype)
            y, last, before, products = portable.forward(
                self.cell.reference, u.to(h0.dtype), w.to(h0.dtype), wide, h0, mask, starts
            )
        kept = [torch.stack(x) if keep else h0.new_empty(0) for x in (before, products)]
        return y.to(u.dtype), last, *kept, h0.new_empty(0)

    def _run_backward(
        self, gy: Tensor, g_last: Tensor, u: Tensor | None, w: Tensor, *rest: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        k0, k1, k2, mask, starts, backend = rest
        if backend != "torch":
            return native.backward(self.cell, backend, gy, g_last, w.to(gy.dtype), k0, k1, k2, mask)
        assert u is not None
        full = k1.dtype
        du, dp, dh0 = portable.backward(
            self.cell.reference, gy.to(full), g_last, u.to(full), w.to(full), k0, k1, mask, starts
        )
        return du, dp, dp.sum(0), dh0

    def _fake_forward(self, u: Tensor, w: Tensor, _b: Any, h0: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        *_, keep, backend = rest
        (steps, rows, wide), width, states = u.shape, w.shape[1], h0.shape[0]
        y, last = u.new_empty(steps, rows, width), torch.empty_like(h0)
        none: tuple[int, ...] = (0,)
        if backend == "torch":
            shapes: list[tuple[int, ...]] = (
                [(steps, states, rows, width), (steps, rows, wide)] if keep else [none, none]
            )
            return y, last, *(h0.new_empty(s) for s in shapes), h0.new_empty(0)
        history, kept = (steps + 1, rows, width), (steps, rows, self.cell.kept * width)
        memory = keep and (states > 1 or self.cell.inner is not None)
        shapes = [history, history if memory else none, kept if keep else none]
        return y, last, *(u.new_empty(s) for s in shapes)

    def _fake_backward(self, gy: Tensor, g_last: Tensor, _u: Any, w: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        backend, dtype = rest[-1], rest[1].dtype if rest[-1] == "torch" else gy.dtype
        dp = gy.new_empty(*gy.shape[:2], w.shape[0], dtype=dtype)
        du = torch.empty_like(dp) if backend == "torch" or self.cell.splits else dp.new_empty(0)
        return du, dp, g_last.new_empty(dp.shape[1:]), torch.empty_like(g_last)

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        u, w, b, _h0, mask, starts, _keep, backend = inputs
        _, last, *kept = output
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(u if backend == "torch" else None, w, *kept, mask, starts)
        ctx.backend, ctx.dtype, ctx.shape, ctx.bias = backend, u.dtype, last.shape, None if b is None else b.dtype

    def _differentiate(self, ctx: Any, gy: Tensor | None, g_last: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        u, w, *kept, mask, starts = ctx.saved_tensors
        _, rows, width = ctx.shape
        steps = len(kept[0]) - (ctx.backend != "torch")
        if gy is None:
            gy = kept[0].new_zeros(steps, rows, width, dtype=ctx.dtype)
        if g_last is None:
            wide = torch.float64 if ctx.dtype == torch.float64 else torch.float32
            g_last = kept[0].new_zeros(ctx.shape, dtype=wide)
        du, dp, dbias, dh0 = self._backward(gy, g_last, u, w, *kept, mask, starts, ctx.backend)
        du = du if du.numel() else dp
        before = kept[0][:, 0] if ctx.backend == "torch" else kept[0][:-1]
        _, needs_w, needs_b, *_ = ctx.needs_input_grad

        def of_rows(dp: Tensor, multiplied: Tensor) -> Tensor:
            return product(dp.flatten(0, 1).t(), multiplied.reshape(steps * rows, width), w.dtype)

        dw = None
        if needs_w and self.cell.inner is None:
            dw = of_rows(dp, before)
        elif needs_w:
            dw = torch.cat([of_rows(dp[..., :-width], before), of_rows(dp[..., -width:], kept[1][:-1])])
        db = dbias.sum(0).to(ctx.bias) if needs_b else None
        return du.to(ctx.dtype), dw, db, dh0, None, None, None, None
