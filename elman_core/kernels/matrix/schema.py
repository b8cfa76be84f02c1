"""The matrix-state op as PyTorch knows it: its schema, its shapes without data, its derivative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.library import Library, register_autograd, register_fake

from elman_core.kernels.spec import Target

from . import run

_library = Library("elman", "FRAGMENT")
_INPUTS = "Tensor q, Tensor? k, Tensor? v, Tensor decay, Tensor? write"
_HEADS = "Tensor? mask, Tensor? a_log, Tensor? dt_bias"
_FORM = "int rows, bool linear, str maps"


def register(name: str, load: run.Load) -> Callable[..., Any]:
    """`elman::matrix_NAME` and its backward, run by the modules that `load` gives; returns the op.

    Its outputs: o (B, T, H, V), S_T (B, H, N, V), and, for the backward alone, the saved states, or empty.
    """
    op = f"matrix_{name}"
    _library.define(
        f"{op}({_INPUTS}, Tensor? state, {_HEADS}, {_FORM}, bool keep, str backend) -> (Tensor, Tensor, Tensor)"
    )
    _library.define(
        f"{op}_backward(Tensor dy, Tensor? ds1, {_INPUTS}, {_HEADS}, Tensor saved, {_FORM}, str backend)"
        f" -> ({', '.join(['Tensor'] * 8)})"
    )

    def form(rows: int, linear: bool, maps: str, backend: str) -> run.Form:
        return run.Form(name, rows, linear, maps, cast(Target, backend))

    def forward(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, decay, write, state, *heads, rows, linear, maps, keep, backend = given
        what = form(rows, linear, maps, backend)
        return run.forward(load, what, state, keep, q, k, v, decay, write, *heads)

    def backward(*given: Any) -> tuple[Tensor, ...]:
        dy, ds1, *inputs, saved, rows, linear, maps, backend = given
        return run.backward(load, form(rows, linear, maps, backend), dy, ds1, saved, *inputs)

    _library.impl(op, forward, "CompositeExplicitAutograd")
    _library.impl(f"{op}_backward", backward, "CompositeExplicitAutograd")
    register_fake(f"elman::{op}", run.fake_forward, lib=_library)
    register_fake(f"elman::{op}_backward", run.fake_backward, lib=_library)
    backward_op = getattr(torch.ops.elman, f"{op}_backward").default

    def differentiate(ctx: Any, dy: Tensor | None, ds1: Tensor | None, _saved: Any) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                f"{name}: gradients of gradients (create_graph=True) exist only with backend='reference'"
            )
        q, k, v, decay, write, mask, a_log, dt_bias, saved = ctx.saved_tensors
        if dy is None:
            dy = q.new_zeros(ctx.o_shape)
        dq, dk, dv, ddecay, dwrite, ds0, da_log, ddt_bias = backward_op(
            dy, ds1, q, k, v, decay, write, mask, a_log, dt_bias, saved, *ctx.rest
        )
        if v is None and run.beside(q, decay):
            dq, ddecay = dq.split([q.shape[2], decay.shape[2]], -1)
        return (
            dq, None if k is None else dk, None if v is None else dv, ddecay, None if write is None else dwrite,
            ds0 if ctx.has_state else None, None, None if a_log is None else da_log, None if dt_bias is None else ddt_bias,
            None, None, None, None, None, None,
        )  # fmt: skip

    register_autograd(f"elman::{op}", differentiate, setup_context=_save, lib=_library)
    made: Callable[..., Any] = getattr(torch.ops.elman, op).default
    return made


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, decay, write, state, mask, a_log, dt_bias, rows, linear, maps, _keep, backend = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, decay, write, mask, a_log, dt_bias, output[2])
    ctx.rest, ctx.has_state, ctx.o_shape = (rows, linear, maps, backend), state is not None, output[0].shape
