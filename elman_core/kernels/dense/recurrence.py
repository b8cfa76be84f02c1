"""`elman::dense_NAME` and its backward: the dense recurrence as `torch.library` knows it, on every back end that is named.

Shapes: T time, B batch, d width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.library import Library, register_autograd

from elman_core.kernels.cell import Cell
from elman_core.kernels.runtime import implement, refuse_second_derivatives, without_autocast
from elman_core.registry.errors import ConfigError, KernelError

from . import portable, products, run

_library = Library("elman", "FRAGMENT")


class Recurrence:
    """The operator of one cell, `op(u, *extras, w, h0, mask, starts, backend)`, and its derivative."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.op, self._backward = self._register()

    def _parts(self, rest: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """What follows u in a call, or the gradients in a backward: (extras, what follows those)."""
        return list(rest[: len(self.cell.extras)]), list(rest[len(self.cell.extras) :])

    def _register(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        count = len(self.cell.extras)
        op, op_backward = f"dense_{self.cell.name}", f"dense_{self.cell.name}_backward"
        es = "".join(f"Tensor e{i}, " for i in range(count))
        _library.define(
            f"{op}(Tensor u, {es}Tensor w, Tensor h0, Tensor? mask, Tensor? starts, str backend)"
            " -> (Tensor, Tensor, Tensor, Tensor)"
        )
        _library.define(
            f"{op_backward}(Tensor gy, Tensor g_last, {es}Tensor w, Tensor history, Tensor a, Tensor? mask,"
            f" Tensor? starts, str backend) -> ({', '.join(['Tensor'] * (2 + count))})"
        )
        made = implement(_library, op, self._run_forward, self._fake_forward)
        register_autograd(f"elman::{op}", self._differentiate, setup_context=self._save, lib=_library)
        return made, implement(_library, op_backward, self._run_backward, self._fake_backward)

    # Outputs of the op: y (T, B, d), h_T (B, d), and, for the backward alone, history (T+1, B, d) and a (T, B, d) or empty.

    def _run_forward(self, u: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        extras, (w, h0, mask, starts, backend) = self._parts(rest)
        if backend == "torch":
            with without_autocast(u):
                u_, w_, *others = (x.to(h0.dtype) for x in (u, w, *extras))
                y, history, a = portable.forward(
                    self.cell.update, self.cell.readout, u_, others, w_, h0, mask, starts
                )  # fmt: skip
            return y.to(u.dtype), history[-1].clone(), history, a
        self._check_native(backend, u, starts)
        y, last, history, _, a = run.forward(self.cell, u, extras, w.to(u.dtype), h0, mask)
        return y, last, history, a

    def _run_backward(self, gy: Tensor, g_last: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        extras, (w, history, a, mask, starts, backend) = self._parts(rest)
        if backend == "torch":
            gy_, w_, *others = (x.to(history.dtype) for x in (gy, w, *extras))
            da, dextras, dh0 = portable.backward(
                self.cell.update, self.cell.readout, gy_, g_last, others, w_, history, a, mask, starts
            )
        else:
            da, dextras, dh0, *_ = run.backward(self.cell, gy, g_last, extras, w.to(history.dtype), history, a, mask)
        return da, dh0, *(d.to(e.dtype) for d, e in zip(dextras, extras, strict=True))

    def _fake_forward(self, u: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        *_, h0, _mask, _starts, backend = rest
        steps, rows, width = u.shape
        stored = h0.dtype if backend == "torch" else u.dtype
        kept = self.cell.update is not None if backend == "torch" else self.cell.uses_a
        a_shape = (steps, rows, width) if kept else (0,)
        return (
            u.new_empty(steps, rows, width),
            h0.new_empty(rows, width),
            u.new_empty(steps + 1, rows, width, dtype=stored),
            u.new_empty(a_shape, dtype=stored),
        )

    def _fake_backward(self, gy: Tensor, g_last: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        extras, (_w, history, *_rest) = self._parts(rest)
        return (
            history.new_empty(gy.shape),
            g_last.new_empty(g_last.shape),
            *(e.new_empty(gy.shape) for e in extras),
        )

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        u, *rest = inputs
        extras, (w, _h0, mask, starts, backend) = self._parts(rest)
        _, last, history, a = output
        ctx.set_materialize_grads(False)  # a gradient of the history, which nobody sees, need not be filled with zeros
        ctx.save_for_backward(*extras, w, history, a, mask, starts)
        ctx.backend, ctx.dtype, ctx.states = backend, u.dtype, last.dtype

    def _differentiate(self, ctx: Any, gy: Tensor | None, g_last: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives(self.cell.name)
        extras, (w, history, a, mask, starts) = self._parts(ctx.saved_tensors)
        steps, (rows, width) = history.shape[0] - 1, history.shape[1:]
        if gy is None:
            gy = history.new_zeros(steps, rows, width, dtype=ctx.dtype)
        if g_last is None:
            g_last = history.new_zeros(rows, width, dtype=ctx.states)
        da, dh0, *dextras = self._backward(gy, g_last, *extras, w, history, a, mask, starts, ctx.backend)
        dw = None
        if ctx.needs_input_grad[1 + len(extras)]:
            before = portable.restarted(history[:-1], starts).reshape(steps * rows, width)
            flat = da.reshape(steps * rows, width)
            with without_autocast(da):  # a backward may be called inside autocast
                dw = products.product(flat.t(), before, w.dtype)
        return da.to(ctx.dtype), *dextras, dw, dh0, None, None, None

    def _check_native(self, backend: str, like: Tensor, starts: Tensor | None) -> None:
        if backend not in ("host", "cuda"):
            raise ConfigError(
                f"{self.cell.name}: backend must be auto, torch, cuda, host or reference, not {backend!r}"
            )
        if starts is not None:
            raise KernelError(
                f"{self.cell.name}: backend {backend!r} takes no starts of documents; use backend='torch'"
            )
        if like.device.type != ("cpu" if backend == "host" else "cuda"):
            raise KernelError(f"{self.cell.name}: backend {backend!r} cannot run on tensors on {like.device}")
