"""`elman::dense_NAME` and its backward: a dense recurrence as `torch.library` and the chooser know it.

With tied weights, W projects the input too, and one launch computes

    a_t = W h_{t-1} + W x_t + b = W (h_{t-1} + x_t) + b,   x = silu(v),   (h_t, y_t) = cell(a_t, h_{t-1}, e_t)

The kernel adds x_{t+1} to the state it hands to the next step, so one product covers both, and no product over all steps comes
before the loop. In the backward the loop's product is the gradient of x:

    s_t = h_{t-1} + x_t,   dx_t = W^T da_t,   dW = sum over t of da_t s_t^T,   db = sum over t of da_t

The launch computes SiLU, its derivative and all of these but dW, which is one product over all places. A separate projection
would cost three such products (W x and its two gradients) and an addition of two dW.

Shapes: T time, B batch, d width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from elman_core.kernels.build import Extension
from elman_core.kernels.choice import Compiled, register
from elman_core.kernels.runtime import operator, tensors, without_autocast
from elman_core.kernels.spec import Case, Cell, KernelSpec

from . import portable, run, spec

_FLAGS = "Tensor? mask, Tensor? starts, str backend"


class Recurrence(Compiled):
    """The operator of one cell and its derivative.

    It is `op(u, *extras, w, h0, mask, starts, backend) -> (y, h_T, history, a)`, and for tied weights
    `op(x, *extras, w, b, h0, mask, starts, "cuda") -> (y, h_T, history, a, sums)`. Only the backward reads history (T+1, B, d),
    the states; a (T, B, d) or empty; and sums (T+1, B, d), the s_t.

    Args:
        cell: the cell of the recurrence. kernel: its `DenseKernel`, which verification calls.
    """

    def __init__(self, cell: Cell, kernel: Callable[..., tuple[Tensor, Tensor]]) -> None:
        self.cell, self.name, self.tied, self._kernel = cell, cell.name, cell.bare is not None, kernel
        self._extras = count = len(cell.extras)
        w = "".join(f"Tensor e{i}, " for i in range(count)) + "Tensor w"
        b, x = (", Tensor b", ", Tensor x") if self.tied else ("", "")
        self._backward = operator(
            f"dense_{self.name}_backward(Tensor gy, Tensor g_last, {w}{x}, Tensor history, Tensor a, {_FLAGS})"
            f" -> {tensors(2 + count + 2 * self.tied)}",
            self._run_backward,
            self._fake_backward,
        )
        self.op = operator(
            f"dense_{self.name}(Tensor u, {w}{b}, Tensor h0, {_FLAGS}) -> {tensors(4 + self.tied)}",
            self._run_forward,
            self._fake_forward,
            self._save,
            self._differentiate,
        )
        register(self)

    def prepare(self, dtype: torch.dtype, rows: int, width: int, *slots: int) -> str | None:
        """As `choice.Compiled`; None for tied weights if no persistent launch holds W."""
        index = torch.cuda.current_device()
        chosen = run.plan_for(self.cell, rows, width, dtype, index, *slots)
        if chosen.kind == "steps" and self.tied:
            return None
        run.ready(self.cell, rows, width, dtype, index, *slots)
        return str(chosen)

    def builds(self, arch: str, dtype: torch.dtype, _rows: int, width: int, *slots: int) -> Sequence[Extension]:
        return spec.builds(self.cell, "cuda", arch, [width], [dtype], *slots)

    def cases(self, dtype: torch.dtype, rows: int, width: int, *slots: int) -> Sequence[Case]:
        return [Case.of("TBdS"[: 3 + len(slots)], (64, rows, width, *slots), dtype)]

    def spec(self) -> KernelSpec:
        """What `elman verify` checks."""
        return spec.make_spec(self.cell, self._kernel, self.op)

    def _parts(self, rest: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """The arguments behind the input or the gradients, as (extras, the others)."""
        return rest[: self._extras], rest[self._extras :]

    def _run_forward(self, u: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        extras, (w, *b, h0, mask, starts, backend) = self._parts(rest)
        if backend != "torch":
            return run.forward(self.cell, backend, u, extras, w if w.dtype == u.dtype else w.to(u.dtype), h0, mask, *b)
        with without_autocast(u):
            u_, w_, *others = (x.to(h0.dtype) for x in (u, w, *extras))
            y, history, a = portable.forward(self.cell, u_, others, w_, h0, mask, starts)
        return y.to(u.dtype), history[-1].clone(), history, a

    def _run_backward(self, gy: Tensor, g_last: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        """The gradients of the input, h_0 and the extras; with tied weights also da and the gradient of b."""
        extras, (w, *x, history, a, mask, starts, backend) = self._parts(rest)
        if backend == "torch":
            gy_, w_, *others = (x.to(history.dtype) for x in (gy, w, *extras))
            da, dextras, dh0 = portable.backward(self.cell, gy_, g_last, others, w_, history, a, mask, starts)
            return da, dh0, *(d.to(e.dtype) for d, e in zip(dextras, extras, strict=True))
        w = w.to(history.dtype)
        da, dextras, dh0, *tied = run.backward(self.cell, backend, gy, g_last, extras, w, history, a, mask, *x)
        if not tied:
            return da, dh0, *dextras
        dx, db = tied
        return dx, dh0, *dextras, da, db

    def _fake_forward(self, u: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        *_, h0, _mask, _starts, backend = rest
        steps, rows, width = u.shape
        plain = backend == "torch"
        kept, stored = (self.cell.update is not None, h0.dtype) if plain else (self.cell.uses_a, u.dtype)
        history, *sums = (u.new_empty(steps + 1, rows, width, dtype=stored) for _ in range(1 + self.tied))
        a = u.new_empty(u.shape if kept else 0, dtype=stored)
        return u.new_empty(u.shape), h0.new_empty(rows, width), history, a, *sums

    def _fake_backward(self, gy: Tensor, g_last: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        extras, (_w, *_x, history, _a, _mask, _starts, _backend) = self._parts(rest)
        du, dh0 = history.new_empty(gy.shape), g_last.new_empty(g_last.shape)
        tied = (history.new_empty(gy.shape), g_last.new_empty(gy.shape[2])) if self.tied else ()
        return du, dh0, *(e.new_empty(gy.shape) for e in extras), *tied

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        u, *rest = inputs
        extras, (w, *b, _h0, mask, starts, backend) = self._parts(rest)
        _, last, history, a, *sums = output
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*extras, w, *((u, *sums) if self.tied else ()), history, a, mask, starts)
        ctx.backend, ctx.dtype, ctx.states, ctx.biases = backend, u.dtype, last.dtype, [each.dtype for each in b]

    def _differentiate(self, ctx: Any, gy: Tensor | None, g_last: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        extras, (w, *tied, history, a, mask, starts) = self._parts(ctx.saved_tensors)
        rows, width = history.shape[1:]
        if gy is None:
            gy = history.new_zeros(len(history) - 1, rows, width, dtype=ctx.dtype)
        if g_last is None:
            g_last = history.new_zeros(rows, width, dtype=ctx.states)
        du, dh0, *rest = self._backward(gy, g_last, *extras, w, *tied[:1], history, a, mask, starts, ctx.backend)
        dextras, of_tied = self._parts(rest)
        da, *db = of_tied or (du,)
        dw = None
        if ctx.needs_input_grad[1 + len(extras)]:
            multiplied = tied[1][:-1] if tied else portable.restarted(history[:-1], starts)
            flat, before = da.reshape(-1, width), multiplied.reshape(-1, width)
            dw = portable.weight_gradient(flat, before, w)
        biases = [each.to(dtype) for each, dtype in zip(db, ctx.biases, strict=True)]
        return du.to(ctx.dtype), *dextras, dw, *biases, dh0, None, None, None
