"""The matrix-state op in PyTorch: its schema, its output shapes, its derivative."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from elman_core.kernels.runtime import operator, tensors

from . import run
from .modules import MatrixCell

_HEADS = "Tensor? mask, Tensor? a_log, Tensor? dt_bias"
_FORM = "int heads, int rows, str form"


def register(cell: MatrixCell) -> Callable[..., Any]:
    """`elman::matrix_NAME` and its backward; returns the op.

    Its outputs: o (B, T, H, V), S_T (B, H, N, V), and the saved states for the backward, or empty.
    """
    names = ("k", *cell.names)
    inputs = "Tensor q, " + ", ".join(f"Tensor? {each}" for each in names)

    def forward(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
        *inputs, state, mask, a_log, dt_bias, heads, rows, form, keep, backend = given
        return run.forward(run.Form(cell, heads, rows, form, backend), state, keep, *inputs, mask, a_log, dt_bias)

    def backward(dy: Tensor, ds1: Tensor | None, *given: Any) -> tuple[Tensor, ...]:
        *inputs, saved, heads, rows, form, backend = given
        return run.backward(run.Form(cell, heads, rows, form, backend), dy, ds1, saved, *inputs)

    backward_op = operator(
        f"matrix_{cell.name}_backward(Tensor dy, Tensor? ds1, {inputs}, {_HEADS}, Tensor saved, {_FORM}, str backend)"
        f" -> {tensors(len(names) + 4)}",
        backward,
        partial(run.fake_backward, cell),
    )

    def differentiate(ctx: Any, dy: Tensor | None, ds1: Tensor | None, _saved: Any) -> tuple[Tensor | None, ...]:
        *inputs, mask, a_log, dt_bias, saved = ctx.saved_tensors
        q, k, *named = inputs
        if dy is None:
            dy = q.new_zeros(ctx.o_shape)
        dq, *gradients, ds0, da_log, ddt_bias = backward_op(dy, ds1, *inputs, mask, a_log, dt_bias, saved, *ctx.rest)
        first = len(cell.packed)
        scalars = named[first : first + len(cell.scalars)]
        if k is None and run.beside(q, scalars):
            dq, gradients[1 + first] = dq.split([q.shape[2], scalars[0].shape[2]], -1)
        of_inputs = (None if x is None else d for x, d in zip(inputs[1:], gradients, strict=True))
        return (
            dq, *of_inputs, ds0 if ctx.has_state else None, None, None if a_log is None else da_log,
            None if dt_bias is None else ddt_bias, *[None] * 5,
        )  # fmt: skip

    return operator(
        f"matrix_{cell.name}({inputs}, Tensor? state, {_HEADS}, {_FORM}, bool keep, str backend) -> {tensors(3)}",
        forward,
        partial(run.fake_forward, cell),
        _save,
        differentiate,
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *given, state, mask, a_log, dt_bias, heads, rows, form, _keep, backend = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*given, mask, a_log, dt_bias, output[2])
    ctx.rest, ctx.has_state, ctx.o_shape = (heads, rows, form, backend), state is not None, output[0].shape
