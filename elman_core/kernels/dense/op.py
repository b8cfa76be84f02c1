"""`DenseKernel`: one object turns a dense cell into a differentiable op that runs anywhere.

The op is the recurrence over all time steps

    a_t = W h_{t-1} + u_t,   (h_t, y_t) = cell(a_t, h_{t-1}, e_t)

registered with `torch.library` as `elman::dense_NAME` (with its backward `elman::dense_NAME_backward`), so that FakeTensor,
`torch.compile` and CUDA graphs know it. Three back ends compute it:

    torch   plain PyTorch, backward by hand (dense/portable.py): every device; the CPU's, and the fallback of a GPU
    cuda    the persistent kernel of `elman_csrc`, compiled with the cell header at first use: NVIDIA GPUs, sm_80 and newer
    host    the same cell header in C++ loops: an instrument of the tests, taken only when asked for by name

and "reference" is the variant's own slow, obvious function, differentiated by autograd: the truth for all of them.

Shapes: T time, B batch, d width.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, register_autograd

from elman_core.kernels.build import Extension
from elman_core.kernels.decode.step import MOST_EXTRAS, Step
from elman_core.kernels.first_use import ensure_verified
from elman_core.kernels.runtime import (
    implement,
    load_or_warn,
    mode,
    refuse_transforms,
    transformed,
    warn_of_packed_rows,
    without_autocast,
)
from elman_core.kernels.spec import VERIFIED_STEPS, Backend, Case, KernelSpec, Target
from elman_core.registry.errors import ConfigError, KernelError

from . import cuda, host, portable, products
from .check import check_tensors
from .tied import Tied

_library = Library("elman", "FRAGMENT")
_kernels: dict[str, DenseKernel] = {}


class DenseKernel:
    """The op of one dense cell. Make one at module level and call it.

    Args:
        name: of the variant; lower case.
        header: the cell header, as in `elman/dense_cell.h` of `elman_csrc`.
        reference: `reference(u, *extras, w, h0, mask, starts) -> (y, h_T)`.
        readout: `readout(h, h_prev, *extras) -> y` in PyTorch, pointwise, for any number of leading dimensions.
        update: `update(a, h_prev, *extras) -> h` likewise; None for h = a.
        extras: names of the tensors (T, B, d) that the cell reads beside u.
        uses_a: whether the cell's backward is given a; as the header says.
        tied: whether W projects the input too: u = W x + b.
        cell: the C++ name of the cell; "elman::NAME::Cell" unless given.

    Attributes:
        step: one time step and the projection in front of it in one launch, for decoding; None if the cell has no such.
        tied: with tied weights, the op that is given v for x = silu(v); else None.
    """

    def __init__(
        self,
        name: str,
        *,
        header: Path,
        reference: Callable[..., tuple[Tensor, Tensor]],
        readout: Callable[..., Tensor],
        update: Callable[..., Tensor] | None = None,
        extras: Sequence[str] = (),
        uses_a: bool = False,
        tied: bool = False,
        cell: str | None = None,
    ) -> None:
        self.name, self.header, self.reference = name, Path(header), reference
        self.cell = cell or f"elman::{name}::Cell"
        self.readout, self.update, self.extras = readout, update, tuple(extras)
        self.uses_a = uses_a
        self.chosen: dict[tuple[Any, ...], Backend] = {}  # by device, dtype, sizes: what "auto" came to
        self.op, self._backward = self._register()
        _kernels[name] = self
        self.step = Step(self) if len(self.extras) <= MOST_EXTRAS else None
        self.tied = Tied(self, silu=True) if tied else None

    def __call__(self, u_TBd: Tensor, *rest: Tensor | None, backend: Backend = "auto") -> tuple[Tensor, Tensor]:
        """`kernel(u, *extras, w, h0, mask=None, starts=None) -> (y, h_T)`.

        Args:
            u_TBd: what does not depend on the state, float32, bfloat16, float16 or float64; any strides.
            extras: (T, B, d) each, in the dtype of u.
            w_dd: W, rows are outputs; in the dtype of u or in float32.
            h0_Bd: initial state.
            mask_TB: bool; where False the state is held, y is 0, and nothing flows back but through the state.
            starts_TB: bool; where True the state is set to 0 before the step, masked or not. Plain PyTorch alone does that so
                far: on a GPU one warning says so.
            backend: "auto" or one of the module's docstring.

        Returns:
            y (T, B, d) in the dtype of u, and h_T (B, d) in float32 (float64 for float64).

        Raises:
            ConfigError: shapes, dtypes or devices that do not fit together.
            KernelError: a back end asked for that cannot run this.
            NotImplementedError: under torch.func, a back end asked for that it cannot differentiate.
        """
        extras, others = self._parts(rest)
        if not 2 <= len(others) <= 4:
            expected = ", ".join(("u", *self.extras, "w", "h0", "mask=None", "starts=None"))
            raise TypeError(f"{self.name} takes ({expected}), not {1 + len(rest)} tensors")
        w_dd, h0_Bd, mask_TB, starts_TB = (*others, None, None)[:4]
        check_tensors(self.name, self.extras, u_TBd, extras, w_dd, h0_Bd, mask_TB, starts_TB)
        if backend == "auto":
            backend = "reference" if transformed() else "torch"
            if starts_TB is not None:
                warn_of_packed_rows(self.name, u_TBd)
            elif backend == "torch" and u_TBd.is_cuda:
                # Sizes as numbers: a compiled function is compiled anew for another batch or width.
                backend = _choose(self.name, u_TBd.device.index, u_TBd.dtype, int(u_TBd.shape[1]), int(u_TBd.shape[2]))
        elif backend != "reference":
            refuse_transforms(self.name, "backend='auto' or 'reference'")
        if backend == "reference":
            return self.reference(u_TBd, *extras, w_dd, h0_Bd, mask_TB, starts_TB)
        assert h0_Bd is not None  # checked above
        state = torch.float64 if u_TBd.dtype == torch.float64 else torch.float32
        y_TBd, last_Bd, _, _ = self.op(u_TBd, *extras, w_dd, h0_Bd.to(state), mask_TB, starts_TB, backend)
        return y_TBd, last_Bd

    def extension(self, target: Target) -> Extension:
        """What `kernels.build` compiles for the CPU ("host") or a GPU.

        Raises:
            KernelError: the sources are not installed.
        """
        if importlib.util.find_spec("elman_csrc") is None:
            raise KernelError("the kernel sources are not installed: type `pip install elman-csrc`")
        import elman_csrc

        return Extension(
            name=f"{self.name}_dense_{target}",
            binding=elman_csrc.get_bindings() / ("dense_host.cpp" if target == "host" else "dense_cuda.cu"),
            include=(elman_csrc.get_include(),),
            header=self.header,
            defines=(("ELMAN_CELL", self.cell),),
            python=False,
        )

    def steps_sources(self) -> tuple[Path, ...]:
        """The sources of the per-step fallback on a GPU, beside those of `extension("cuda")`."""
        if "cuda" not in self.targets():
            return ()
        bare = self.extension("cuda")
        return tuple(replace(bare, binding=bare.binding.with_name("dense_cuda_steps.cu")).sources())

    def targets(self) -> tuple[Target, ...]:
        """Where `elman_csrc` has a binding of the dense skeleton; nowhere if it is not installed."""
        if importlib.util.find_spec("elman_csrc") is None:
            return ()
        found: tuple[Target, ...] = ("host", "cuda")
        return tuple(t for t in found if self.extension(t).binding.is_file())

    def kept_a(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The shape of the a that a compiled cell keeps for its backward, for u of these sizes."""
        return tuple(sizes) if self.uses_a else (0,)

    def spec(self) -> KernelSpec:
        """What `elman verify` checks of the recurrence itself."""
        from .spec import make_spec

        return make_spec(self)

    def specs(self) -> tuple[KernelSpec, ...]:
        """What `elman verify` checks: give it as `Variant(kernels=….specs())`."""
        return tuple(one.spec() for one in (self, self.tied, self.step) if one is not None)

    def backend(self, device: torch.device | str, width: int) -> str:
        """What "auto" runs at this width, in words; compiles nothing, so before the first use it is what will be tried."""
        device = torch.device(device)
        if device.type != "cuda":
            return "torch"
        if mode() == "off":
            return "torch (ELMAN_KERNELS=off)"
        index = torch.cuda.current_device() if device.index is None else device.index
        made = {backend for (on, _, _, d, *_), backend in self.chosen.items() if (on, d) == (index, width)}
        return " and ".join(sorted(made)) or "cuda, compiled at its first use"

    def _parts(self, rest: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """What follows u in a call, or the gradients in a backward: (extras, what follows those)."""
        return list(rest[: len(self.extras)]), list(rest[len(self.extras) :])

    def _register(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        count = len(self.extras)
        op, op_backward = f"dense_{self.name}", f"dense_{self.name}_backward"
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
                    self.update, self.readout, u_, others, w_, h0, mask, starts
                )  # fmt: skip
            return y.to(u.dtype), history[-1].clone(), history, a
        self._check_native(backend, u, starts)
        if backend == "cuda":
            y, last, history, _, a = cuda.forward(self, u, extras, w.to(u.dtype), h0, mask)
        else:
            y, last, history, a = host.forward(self, u, extras, w.to(u.dtype), h0, mask)
        return y, last, history, a

    def _run_backward(self, gy: Tensor, g_last: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        extras, (w, history, a, mask, starts, backend) = self._parts(rest)
        if backend == "torch":
            gy_, w_, *others = (x.to(history.dtype) for x in (gy, w, *extras))
            da, dextras, dh0 = portable.backward(
                self.update, self.readout, gy_, g_last, others, w_, history, a, mask, starts
            )
        elif backend == "cuda":
            da, dextras, dh0, *_ = cuda.backward(self, gy, g_last, extras, w.to(history.dtype), history, a, mask)
        else:
            da, dextras, dh0 = host.backward(self, gy, g_last, extras, w.to(history.dtype), history, a, mask)
        return da, dh0, *(d.to(e.dtype) for d, e in zip(dextras, extras, strict=True))

    def _fake_forward(self, u: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        *_, h0, _mask, _starts, backend = rest
        steps, rows, width = u.shape
        stored = h0.dtype if backend == "torch" else u.dtype
        kept = self.update is not None if backend == "torch" else self.uses_a
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
        ctx.backend, ctx.dtype, ctx.state_dtype = backend, u.dtype, last.dtype

    def _differentiate(self, ctx: Any, gy: Tensor | None, g_last: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                f"{self.name}: gradients of gradients (create_graph=True) exist only with backend='reference'"
            )
        extras, (w, history, a, mask, starts) = self._parts(ctx.saved_tensors)
        steps, (rows, width) = history.shape[0] - 1, history.shape[1:]
        if gy is None:
            gy = history.new_zeros(steps, rows, width, dtype=ctx.dtype)
        if g_last is None:
            g_last = history.new_zeros(rows, width, dtype=ctx.state_dtype)
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
            raise ConfigError(f"{self.name}: backend must be auto, torch, cuda, host or reference, not {backend!r}")
        if starts is not None:
            raise KernelError(f"{self.name}: backend {backend!r} takes no starts of documents; use backend='torch'")
        if like.device.type != ("cpu" if backend == "host" else "cuda"):
            raise KernelError(f"{self.name}: backend {backend!r} cannot run on tensors on {like.device}")


@torch.compiler.assume_constant_result
def _choose(name: str, index: int, dtype: torch.dtype, rows: int, width: int) -> Backend:
    """The back end for "auto" on a GPU, for the kernel of that name.

    The length does not matter to it, and a choice holds for the process: `torch.compile` evaluates this while it traces, and
    takes only plain values as arguments.
    """
    kernel = _kernels[name]
    key = (index, dtype, rows, width, mode())
    if key not in kernel.chosen:
        kernel.chosen[key] = "torch" if mode() == "off" else _prepare(kernel, index, dtype, rows, width)
    return kernel.chosen[key]


def _prepare(kernel: DenseKernel, index: int, dtype: torch.dtype, rows: int, width: int) -> Backend:
    """Compile and load, and verify at the first use."""
    sizes = (VERIFIED_STEPS, rows, width)
    with torch.cuda.device(index):
        plan = load_or_warn(kernel.name, lambda: cuda.prepare(kernel, sizes, dtype))
        if plan is not None:
            ensure_verified(kernel.spec(), Case(dict(zip("TBd", sizes, strict=True)), dtype), plan)
    return "torch" if plan is None else "cuda"
