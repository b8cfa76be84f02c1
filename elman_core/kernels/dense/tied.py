"""`Tied`: a dense recurrence whose one matrix projects the input too, without the projection. T time, B batch, d width.

    a_t = W h_{t-1} + W x_t + b = W (h_{t-1} + x_t) + b,   (h_t, y_t) = cell(a_t, h_{t-1}, e_t)

The kernel adds x_{t+1} to the state that it hands to the next step, whose product is then both. So there is no product for all
steps before the loop, and, going back, what the loop multiplies is the gradient of x:

    s_t = h_{t-1} + x_t,   dx_t = W^T da_t,   dW = sum over t of da_t s_t^T,   db = sum over t of da_t

of which the launch makes all but dW, one product over all places; and x = silu(u) and its derivative, if it is asked to. The
projection apart would cost three products over all places (W x and its two gradients) and an addition of two dW.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import Library, register_autograd

from elman_core.kernels.build import Extension
from elman_core.kernels.first_use import ensure_verified
from elman_core.kernels.runtime import (
    autocast_dtype,
    implement,
    load_or_warn,
    mode,
    refuse_transforms,
    transformed,
    without_autocast,
)
from elman_core.kernels.spec import VERIFIED_STEPS, Backend, Case, Grid, Inputs, KernelSpec, Outputs, Target
from elman_core.registry.errors import ConfigError, KernelError

from . import cuda, plan, products, spec
from .check import check_tensors
from .plan import Plan

if TYPE_CHECKING:
    from .op import DenseKernel

_library = Library("elman", "FRAGMENT")
_tied: dict[str, Tied] = {}


class Tied:
    """The op of a dense cell with tied weights. Make one at module level, beside the kernel.

    Where a persistent launch holds W, this is one launch each way; elsewhere it is the product and the kernel.

    Args:
        kernel: whose cell it runs.
        silu: whether it is given u for x = silu(u).
    """

    def __init__(self, kernel: DenseKernel, *, silu: bool = False) -> None:
        self.kernel, self.silu = kernel, silu
        self.name = f"{kernel.name}_tied_silu" if silu else f"{kernel.name}_tied"
        self.uses_a, self.kept_a = kernel.uses_a, kernel.kept_a
        self.chosen: dict[tuple[Any, ...], bool] = {}  # by device, dtype, sizes: whether it is one launch
        self.op, self._backward = self._register()
        _tied[self.name] = self

    def __call__(self, x_TBd: Tensor, *rest: Tensor | None, backend: Backend = "auto") -> tuple[Tensor, Tensor]:
        """`tied(x, *extras, w, b, h0, mask=None, starts=None) -> (y, h_T)`.

        Args:
            x_TBd: the input, or u; as u of the kernel. Under autocast it is taken in the dtype of that.
            extras, w, h0, mask, starts: as the kernel takes them. b: (d,), in the dtype of w or in float32.
            backend: as the kernel's; "cuda" is one launch where there is one.

        Returns:
            y (T, B, d) in the dtype of x, and h_T (B, d) in float32 (float64 for float64).

        Raises:
            ConfigError, KernelError, NotImplementedError: as the kernel.
        """
        count = len(self.kernel.extras)
        extras, (w_dd, b_d, h0_Bd, *flags) = rest[:count], rest[count:]
        assert w_dd is not None
        assert b_d is not None
        mask_TB, starts_TB = (*flags, None, None)[:2]
        narrow_TBd = x_TBd.to(autocast_dtype(x_TBd)) if x_TBd.is_cuda else x_TBd
        if starts_TB is not None or not self._in_one(narrow_TBd, backend):
            u_TBd = F.linear(self._activated(x_TBd), w_dd, b_d.to(w_dd.dtype))
            return self.kernel(u_TBd, *extras, w_dd, h0_Bd, mask_TB, starts_TB, backend=backend)
        check_tensors(self.name, self.kernel.extras, narrow_TBd, extras, w_dd, h0_Bd, mask_TB)
        assert h0_Bd is not None  # checked above
        if b_d.shape != w_dd.shape[:1] or b_d.device != w_dd.device:
            raise ConfigError(
                f"{self.name}: b must be {tuple(w_dd.shape[:1])} on {w_dd.device}, not {tuple(b_d.shape)} on {b_d.device}"
            )
        y_TBd, last_Bd, *_ = self.op(narrow_TBd, *extras, w_dd, b_d, h0_Bd.float(), mask_TB)
        return y_TBd, last_Bd

    def extension(self, target: Target) -> Extension:
        """What `kernels.build` compiles; the kernel's, with x in the place of u.

        Raises:
            KernelError: the sources are not installed.
        """
        bare = self.kernel.extension(target)
        return replace(
            bare,
            name=f"{self.name}_dense_{target}",
            defines=(*bare.defines, ("ELMAN_INPUT", "TiedSilu" if self.silu else "Tied")),
        )

    def spec(self) -> KernelSpec:
        """What `elman verify` checks: give it beside the kernel's own as `Variant(kernels=(….spec(), ….spec()))`."""
        return _make_spec(self)

    def backend(self, device: torch.device | str, width: int) -> str:
        """As `DenseKernel.backend`: what "auto" runs at this width, in words."""
        device = torch.device(device)
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            if any(one for (on, _, _, d, _), one in self.chosen.items() if (on, d) == (index, width)):
                return "cuda"
        return self.kernel.backend(device, width)

    def plan_for(self, sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Plan | None:
        """The plan of one launch for sizes (T, B, d); None where no persistent launch holds W.

        Raises:
            KernelError: not supported by the kernel at all, or it cannot be built.
        """
        chosen = cuda.plan_for(self, sizes, dtype, device)
        return None if chosen.kind == "steps" else chosen

    def _activated(self, x_TBd: Tensor) -> Tensor:
        return F.silu(x_TBd) if self.silu else x_TBd

    def _in_one(self, x_TBd: Tensor, backend: Backend) -> bool:
        """Whether this is one launch. Compiles and verifies it at the first use of a size, if "auto" asks."""
        if not x_TBd.is_cuda or x_TBd.dim() != 3 or x_TBd.dtype not in spec.CUDA_DTYPES:
            return False
        if backend == "auto" and not transformed():
            return _choose(self.name, x_TBd.device.index, x_TBd.dtype, int(x_TBd.shape[1]), int(x_TBd.shape[2]))
        if backend != "cuda":
            return False
        refuse_transforms(self.name, "backend='auto' or 'reference'")
        _, rows, width = x_TBd.shape
        return self.plan_for((1, rows, width), x_TBd.dtype, x_TBd.device) is not None

    def _register(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        count, op, op_backward = len(self.kernel.extras), f"dense_{self.name}", f"dense_{self.name}_backward"
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
        return cuda.forward(self, x, extras, w.to(x.dtype), h0, mask, b)

    def _run_backward(self, gy: Tensor, g_last: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        *extras, w, x, history, a, mask = rest
        da, dextras, dh0, dx, db = cuda.backward(self, gy, g_last, extras, w.to(history.dtype), history, a, mask, x)
        assert dx is not None
        assert db is not None
        return da, dx, dh0, db, *dextras

    def _fake_forward(self, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        *_, h0, _mask = rest
        steps, rows, width = x.shape
        history, sums = (x.new_empty(steps + 1, rows, width) for _ in range(2))
        return x.new_empty(x.shape), h0.new_empty(rows, width), history, sums, x.new_empty(self.kept_a(x.shape))

    def _fake_backward(self, gy: Tensor, g_last: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        *extras, _w, _x, history, _a, _mask = rest
        da, dx, db = history.new_empty(gy.shape), history.new_empty(gy.shape), g_last.new_empty(gy.shape[2])
        return da, dx, g_last.new_empty(g_last.shape), db, *(e.new_empty(gy.shape) for e in extras)

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, *extras, w, b, _h0, mask = inputs
        _, _, history, sums, a = output
        ctx.set_materialize_grads(False)
        given = x if self.silu else history  # only the derivative of SiLU wants x again
        ctx.save_for_backward(*extras, w, given, history, sums, a, mask)
        ctx.bias_dtype = b.dtype

    def _differentiate(self, ctx: Any, gy: Tensor | None, g_last: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                f"{self.name}: gradients of gradients (create_graph=True) exist only with backend='reference'"
            )
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


@torch.compiler.assume_constant_result
def _choose(name: str, index: int, dtype: torch.dtype, rows: int, width: int) -> bool:
    """Whether "auto" is one launch on a GPU, for the op of that name; `torch.compile` evaluates this while it traces."""
    tied = _tied[name]
    key = (index, dtype, rows, width, mode())
    if key not in tied.chosen:
        tied.chosen[key] = mode() != "off" and _prepare(tied, index, dtype, rows, width)
    return tied.chosen[key]


def _prepare(tied: Tied, index: int, dtype: torch.dtype, rows: int, width: int) -> bool:
    """Compile and load, and verify at the first use."""
    sizes, device = (VERIFIED_STEPS, rows, width), torch.device("cuda", index)
    with torch.cuda.device(index):
        plan = load_or_warn(tied.name, lambda: tied.plan_for(sizes, dtype, device))
        if plan is not None:  # whose module is loaded: the driver was asked whether its blocks fit
            ensure_verified(tied.spec(), Case(dict(zip("TBd", sizes, strict=True)), dtype), str(plan))
    return plan is not None


def _make_spec(tied: Tied) -> KernelSpec:
    """What `verify` knows of a dense kernel with tied weights: its problems are the kernel's, with x and b for u."""
    kernel, bare = tied.kernel, spec.make_spec(tied.kernel)

    def make_inputs(case: Case, generator: torch.Generator) -> Inputs:
        inputs = bare.make_inputs(case, generator)
        inputs["x"] = inputs.pop("u")
        inputs["b"] = torch.randn(case.sizes["d"], generator=generator).to(spec.state_dtype(case.dtype))
        return inputs

    names = ("x", *kernel.extras, "w", "b", "h0", "mask")

    def call(backend: str, inputs: Inputs, options: Mapping[str, Any]) -> Outputs:
        if backend == "cuda":
            y, last = tied(*(inputs[n] for n in names), backend="cuda")  # type: ignore[arg-type]
            return {"y": y, "h_T": last}
        x, w, b = inputs["x"], inputs["w"], inputs["b"]
        assert x is not None
        assert w is not None
        wide = b.dtype if b is not None else x.dtype
        u = F.linear(tied._activated(x.to(wide)), w.to(wide), b).to(x.dtype)
        return bare.call(backend, {**inputs, "u": u}, options)

    def op(backend: str, inputs: Inputs, _options: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...]] | None:
        return (tied.op, tuple(inputs[n] for n in names)) if backend == "cuda" else None

    def cases(target: Target, grid: Grid) -> list[Case]:
        return list(bare.cases(target, grid))

    def needs(_target: Target, cases: Sequence[Case]) -> list[Extension]:
        found, device = [], torch.device("cuda", torch.cuda.current_device())
        for case in cases:
            sizes = (case.sizes["T"], case.sizes["B"], case.sizes["d"])
            with contextlib.suppress(KernelError):  # the case itself reports what is not supported
                chosen = plan.plan(sizes, case.dtype, cuda._device(device.index))
                runner = kernel if chosen.kind == "steps" else tied
                found.append(cuda.extension(runner, chosen, case.dtype, case.sizes["d"]))
        return found

    def builds(target: Target, arch: str, widths: Sequence[int], dtypes: Sequence[torch.dtype]) -> list[Extension]:
        return [e for e in spec.builds(tied, target, arch, widths, dtypes) if ("ELMAN_KIND" in dict(e.defines))]

    return replace(
        bare,
        name=tied.name,
        cases=cases,
        make_inputs=make_inputs,
        call=call,
        extension=tied.extension,
        op=op,
        targets=tuple(t for t in bare.targets if t == "cuda"),
        portable=(),
        needs=needs,
        builds=builds,
        python=(*bare.python, Path(inspect.getfile(Tied))),
    )
