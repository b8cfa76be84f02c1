"""`elman::elementwise_NAME` and its backward: the recurrence as an operator of `torch.library`, on each back end.

Shapes: T time, B batch, d width, S states.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from elman_core.kernels.runtime import operator, tensors, without_autocast
from elman_core.kernels.spec import Cell

from . import native, portable


class Recurrence:
    """The operator of one cell, `op(*streams, *vectors, h0, mask, starts, keep, backend)`, and its derivative.

    keep: whether a backward will follow. Outputs: y (T, B, d), h_T (S, B, d), and the states before steps for the backward,
    (n, S, B, d), or empty without `keep`: before every step for "torch", every 16th for "cuda", the first for "host".
    """

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        inputs = "".join(f"Tensor x{i}, " for i in range(len(cell.streams)))
        inputs += "".join(f"Tensor p{i}, " for i in range(len(cell.vectors)))
        marks = "Tensor? mask, Tensor? starts"
        self._backward = operator(
            f"elementwise_{cell.name}_backward(Tensor gy, Tensor g_last, {inputs}Tensor kept, {marks}, str backend)"
            f" -> {tensors(3)}",
            self._run_backward,
            self._fake_backward,
        )
        self.op = operator(
            f"elementwise_{cell.name}({inputs}Tensor h0, {marks}, bool keep, str backend) -> {tensors(3)}",
            self._run_forward,
            self._fake_forward,
            self._save,
            self._differentiate,
        )

    def _run_forward(self, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        *inputs, h0, mask, starts, keep, backend = given
        streams, vectors = inputs[: len(self.cell.streams)], inputs[len(self.cell.streams) :]
        if backend != "torch":
            return native.forward(self.cell, streams, vectors, h0, mask, starts, keep, backend)
        with without_autocast(h0):
            wide = [x.to(h0.dtype) for x in streams]
            y, last, before = portable.forward(self.cell.reference, wide, vectors, h0, mask, starts)
        return y.to(streams[0].dtype), last, torch.stack(before) if keep else h0.new_empty(0)

    def _run_backward(self, gy: Tensor, g_last: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        *inputs, kept, mask, starts, backend = given
        streams, vectors = inputs[: len(self.cell.streams)], inputs[len(self.cell.streams) :]
        if backend != "torch":
            return native.backward(self.cell, gy, g_last, streams, vectors, kept, mask, starts, backend)
        wide = [x.to(kept.dtype) for x in (gy, *streams)]
        dxs, dps, dh0 = portable.backward(self.cell.reference, wide[0], g_last, wide[1:], vectors, kept, mask, starts)
        dp = torch.stack(dps) if dps else g_last.new_empty(0, gy.shape[2])
        return torch.cat(dxs, -1).to(gy.dtype), dp, dh0

    def _fake_forward(self, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        *inputs, h0, _mask, _starts, keep, backend = given
        steps = inputs[0].shape[0]
        count = {"torch": steps, "cuda": (steps + native.INTERVAL - 1) // native.INTERVAL, "host": 1}[backend]
        return (
            inputs[0].new_empty(inputs[0].shape),
            h0.new_empty(h0.shape),
            h0.new_empty((count, *h0.shape) if keep else (0,)),
        )

    def _fake_backward(self, gy: Tensor, g_last: Tensor, *_given: Any) -> tuple[Tensor, Tensor, Tensor]:
        steps, rows, width = gy.shape
        return (
            gy.new_empty(steps, rows, len(self.cell.streams) * width),
            g_last.new_empty(len(self.cell.vectors), width),
            g_last.new_empty(g_last.shape),
        )

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *given, _h0, mask, starts, _keep, backend = inputs
        _, last, kept = output
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*given, kept, mask, starts)
        ctx.backend, ctx.shape = backend, last.shape

    def _differentiate(self, ctx: Any, gy: Tensor | None, g_last: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        *inputs, kept, mask, starts = ctx.saved_tensors
        gy = torch.zeros_like(inputs[0]) if gy is None else gy
        g_last = kept.new_zeros(ctx.shape) if g_last is None else g_last
        dxs, dps, dh0 = self._backward(gy, g_last, *inputs, kept, mask, starts, ctx.backend)
        # Slices of one tensor: the map that made the streams can take it whole.
        return *dxs.split(gy.shape[2], -1), *dps.unbind(0), dh0, None, None, None, None
