"""`Tied`: a dense recurrence whose one matrix projects the input too, without the projection. T time, B batch, d width.

    a_t = W h_{t-1} + W x_t + b = W (h_{t-1} + x_t) + b,   x = silu(v),   (h_t, y_t) = cell(a_t, h_{t-1}, e_t)

The kernel adds x_{t+1} to the state that it hands to the next step, whose product is then both. So there is no product for all
steps before the loop, and, going back, what the loop multiplies is the gradient of x:

    s_t = h_{t-1} + x_t,   dx_t = W^T da_t,   dW = sum over t of da_t s_t^T,   db = sum over t of da_t

of which the launch makes all but dW, one product over all places; and SiLU and its derivative. The projection apart would cost
three products over all places (W x and its two gradients) and an addition of two dW.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, register_autograd

from elman_core.kernels.cell import Cell
from elman_core.kernels.choice import register, runs
from elman_core.kernels.runtime import (
    autocast_dtype,
    implement,
    refuse_second_derivatives,
    refuse_transforms,
    transformed,
    without_autocast,
)
from elman_core.kernels.spec import Backend, Case, KernelSpec
from elman_core.registry.errors import ConfigError, KernelError

from . import products, run, spec
from .check import check_tensors
from .plan import Plan

_library = Library("elman", "FRAGMENT")


class Tied:
    """One launch each way for u = W silu(v) + b, where a persistent launch holds W.

    Args:
        cell: of the recurrence. kernel: its `DenseKernel`, which is verified with this in its place.
    """

    def __init__(self, cell: Cell, kernel: Callable[..., tuple[Tensor, Tensor]]) -> None:
        self.cell = replace(cell, name=f"{cell.name}_tied_silu", input="TiedSilu")
        self._bare, self._kernel = cell, kernel
        self.name = self.cell.name
        self.op, self._backward = self._register()
        register(self)

    def narrowed(self, v_TBd: Tensor) -> Tensor:
        """v in the dtype that autocast computes in, on a GPU."""
        return v_TBd.to(autocast_dtype(v_TBd)) if v_TBd.is_cuda else v_TBd

    def takes(self, v_TBd: Tensor, backend: Backend) -> bool:
        """Whether this is one launch. Compiles and verifies it at the first use of a size, if "auto" asks."""
        if not v_TBd.is_cuda or v_TBd.dim() != 3 or v_TBd.dtype not in spec.CUDA_DTYPES:
            return False
        rows, width = (int(n) for n in v_TBd.shape[1:])
        if backend == "auto" and not transformed():
            return runs(self.name, v_TBd, rows, width)
        if backend != "cuda":
            return False
        refuse_transforms(self.name, "backend='auto' or 'reference'")
        return self.plan_for(v_TBd.dtype, rows, width, v_TBd.device) is not None

    def __call__(self, v_TBd: Tensor, *rest: Tensor | None) -> tuple[Tensor, Tensor]:
        """`tied(v, *extras, w, b, h0, mask) -> (y, h_T)`, as `DenseKernel` gives them.

        Raises:
            ConfigError: tensors that do not fit together.
            KernelError: not on such a GPU: ask `takes` first.
        """
        *extras, w_dd, b_d, h0_Bd, mask_TB = rest
        check_tensors(self.name, self.cell.extras, v_TBd, extras, w_dd, h0_Bd, mask_TB)
        assert w_dd is not None
        assert b_d is not None
        assert h0_Bd is not None  # checked above
        if b_d.shape != w_dd.shape[:1] or b_d.device != w_dd.device:
            raise ConfigError(
                f"{self.name}: b must be {tuple(w_dd.shape[:1])} on {w_dd.device}, not {tuple(b_d.shape)} on {b_d.device}"
            )
        y_TBd, last_Bd, *_ = self.op(v_TBd, *extras, w_dd, b_d, h0_Bd.float(), mask_TB)
        return y_TBd, last_Bd

    def spec(self) -> KernelSpec:
        """What `elman verify` checks."""
        bare = spec.make_spec(self._bare, self._kernel, None)
        return spec.make_tied_spec(self.cell, bare, self._kernel, self.op)

    def plan_for(self, dtype: torch.dtype, rows: int, width: int, device: torch.device) -> Plan | None:
        """The plan of one launch for a batch and width; None where no persistent launch holds W.

        Raises:
            KernelError: not supported by the kernel at all, or it cannot be built.
        """
        chosen = run.plan_for(self.cell, (spec.VERIFIED_STEPS, rows, width), dtype, device)
        return None if chosen.kind == "steps" else chosen

    def prepare(self, dtype: torch.dtype, rows: int, width: int) -> str | None:
        """As `choice.Compiled`. A plan's module is loaded: the driver was asked whether its blocks fit."""
        plan = self.plan_for(dtype, rows, width, torch.device("cuda", torch.cuda.current_device()))
        return None if plan is None else str(plan)

    def cases(self, dtype: torch.dtype, rows: int, width: int) -> Sequence[Case]:
        """As `choice.Compiled`."""
        return spec.first_use(dtype, rows, width)

    def _register(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        count, op, op_backward = len(self.cell.extras), f"dense_{self.name}", f"dense_{self.name}_backward"
        es = "".join(f"Tensor e{i}, " for i in range(count))
        _library.define(
            f"{op}(Tensor x, {es}Tensor w, Tensor b, Tensor h0, Tensor? mask) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
        )
        _library.define(
            f"{op_backward}(Tensor gy, Tensor g_last, {es}Tensor w, Tensor x, Tensor history, Tensor a, Tensor? mask)"
            f" -> ({', '.join(['Tensor'] * (4 + count))})"
        )
        made = implement(_library, op, self._run_forward, self._fake_forward)
        register_autograd(f"elman::{op}", self._differentiate, setup_context=self._save, lib=_library)
        return made, implement(_library, op_backward, self._run_backward, self._fake_backward)

    # Outputs of the op: y (T, B, d), h_T (B, d), and, for the backward alone, the states and s, (T+1, B, d) each, and a.

    def _run_forward(self, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        *extras, w, b, h0, mask = rest
        _must_be_on_a_gpu(self.name, x)
        return run.forward(self.cell, x, extras, w.to(x.dtype), h0, mask, b)

    def _run_backward(self, gy: Tensor, g_last: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        *extras, w, x, history, a, mask = rest
        da, dextras, dh0, dx, db = run.backward(self.cell, gy, g_last, extras, w.to(history.dtype), history, a, mask, x)
        assert dx is not None
        assert db is not None
        return da, dx, dh0, db, *dextras

    def _fake_forward(self, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        *_, h0, _mask = rest
        steps, rows, width = x.shape
        history, sums = (x.new_empty(steps + 1, rows, width) for _ in range(2))
        return (
            x.new_empty(x.shape),
            h0.new_empty(rows, width),
            history,
            sums,
            x.new_empty(x.shape if self.cell.uses_a else 0),
        )

    def _fake_backward(self, gy: Tensor, g_last: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        *extras, _w, _x, history, _a, _mask = rest
        da, dx, db = history.new_empty(gy.shape), history.new_empty(gy.shape), g_last.new_empty(gy.shape[2])
        return da, dx, g_last.new_empty(g_last.shape), db, *(e.new_empty(gy.shape) for e in extras)

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, *extras, w, b, _h0, mask = inputs
        _, _, history, sums, a = output
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*extras, w, x, history, sums, a, mask)
        ctx.bias_dtype = b.dtype

    def _differentiate(self, ctx: Any, gy: Tensor | None, g_last: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives(self.name)
        *extras, w, x, history, sums, a, mask = ctx.saved_tensors
        steps, (rows, width) = history.shape[0] - 1, history.shape[1:]
        if gy is None:
            gy = history.new_zeros(steps, rows, width)
        if g_last is None:
            g_last = history.new_zeros(rows, width, dtype=torch.float32)
        da, dx, dh0, db, *dextras = self._backward(gy, g_last, *extras, w, x, history, a, mask)
        wants_w, wants_b = ctx.needs_input_grad[1 + len(extras) : 3 + len(extras)]
        flat, before = da.reshape(steps * rows, width), sums[:-1].reshape(steps * rows, width)
        with without_autocast(da):  # a backward may be called inside autocast
            dw = products.product(flat.t(), before, w.dtype) if wants_w else None
        return dx, *dextras, dw, db.to(ctx.bias_dtype) if wants_b else None, dh0, None


def _must_be_on_a_gpu(name: str, x: Tensor) -> None:
    if not x.is_cuda:
        raise KernelError(f"{name}: this operator is a kernel of a GPU, and the tensors are on {x.device}")
