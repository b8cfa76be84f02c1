"""`DenseKernel`: one object turns a dense cell into a differentiable op that runs anywhere.

The op is the recurrence over all time steps

    a_t = W h_{t-1} + u_t,   (h_t, y_t) = cell(a_t, h_{t-1}, e_t)

registered with `torch.library` as `elman::dense_NAME` (with its backward `elman::dense_NAME_backward`), so that FakeTensor,
`torch.compile` and CUDA graphs know it. Three back ends compute it:

    torch   plain PyTorch, backward by hand (dense_torch.py): every device; the CPU's, and the fallback of a GPU
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
from typing import Any, Literal

import torch
from torch import Tensor
from torch.library import Library, register_autograd, register_fake

from elman_core.registry.errors import ConfigError, KernelError

from . import dense_cuda, dense_host, dense_torch
from .build import Extension
from .first_use import ensure_verified
from .policy import load_or_warn, mode
from .spec import Case, KernelSpec, Target

Backend = Literal["auto", "torch", "cuda", "host", "reference"]
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
VERIFIED_STEPS = 64  # time steps of the problem by which a batch size and width are verified at their first use
_LONGEST_SUM = 16384  # places (time steps times rows) of one float32 product for dW
_library = Library("elman", "FRAGMENT")
_kernels: dict[str, DenseKernel] = {}


class DenseKernel:
    """The op of one dense cell. Make one at module level and call it.

    Args:
        name: of the variant; lower case.
        header: the cell header, as in `elman/dense_cell.h` of `elman_csrc`.
        cell: the C++ name of the cell: "elman::e99::Cell".
        reference: `reference(u, *extras, w, h0, mask) -> (y, h_T)`.
        readout: `readout(h, h_prev, *extras) -> y` in PyTorch, pointwise, for any number of leading dimensions.
        update: `update(a, h_prev, *extras) -> h` likewise; None for h = a.
        extras: names of the tensors (T, B, d) that the cell reads beside u.
    """

    def __init__(
        self,
        name: str,
        *,
        header: Path,
        cell: str,
        reference: Callable[..., tuple[Tensor, Tensor]],
        readout: Callable[..., Tensor],
        update: Callable[..., Tensor] | None = None,
        extras: Sequence[str] = (),
    ) -> None:
        self.name, self.header, self.cell, self.reference = name, Path(header), cell, reference
        self.readout, self.update, self.extras = readout, update, tuple(extras)
        self.chosen: dict[tuple[Any, ...], Backend] = {}  # by device, dtype, sizes: what "auto" came to
        self.op, self._backward = self._register()
        _kernels[name] = self

    def __call__(self, u_TBd: Tensor, *rest: Tensor | None, backend: Backend = "auto") -> tuple[Tensor, Tensor]:
        """`kernel(u, *extras, w, h0, mask=None) -> (y, h_T)`.

        Args:
            u_TBd: what does not depend on the state, float32, bfloat16, float16 or float64; any strides.
            extras: (T, B, d) each, in the dtype of u.
            w_dd: W, rows are outputs, in the dtype of u or in float32.
            h0_Bd: initial state.
            mask_TB: bool; where False the state is held, y is 0, and nothing flows back but through the state.
            backend: "auto" or one of the module's docstring.

        Returns:
            y (T, B, d) in the dtype of u, and h_T (B, d) in float32 (float64 for float64).

        Raises:
            ConfigError: shapes, dtypes or devices that do not fit together.
            KernelError: a back end asked for that cannot run this.
        """
        count = len(self.extras)
        if not count + 2 <= len(rest) <= count + 3:
            expected = ", ".join(("u", *self.extras, "w", "h0", "mask=None"))
            raise TypeError(f"{self.name} takes ({expected}), not {1 + len(rest)} tensors")
        extras, w_dd, h0_Bd = rest[:count], rest[count], rest[count + 1]
        mask_TB = rest[count + 2] if len(rest) == count + 3 else None
        self._check(u_TBd, extras, w_dd, h0_Bd, mask_TB)
        if backend == "auto":
            backend = "torch"
            if u_TBd.is_cuda:  # sizes as numbers: a compiled function is compiled anew for another batch or width
                backend = _choose(self.name, u_TBd.device.index, u_TBd.dtype, int(u_TBd.shape[1]), int(u_TBd.shape[2]))
        if backend == "reference":
            return self.reference(u_TBd, *extras, w_dd, h0_Bd, mask_TB)
        assert h0_Bd is not None  # checked above
        state = torch.float64 if u_TBd.dtype == torch.float64 else torch.float32
        y_TBd, last_Bd, _, _ = self.op(u_TBd, *extras, w_dd, h0_Bd.to(state), mask_TB, backend)
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

    def spec(self) -> KernelSpec:
        """What `elman verify` checks: give it as `Variant(kernels=(….spec(),))`."""
        from .dense_spec import make_spec

        return make_spec(self)

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

    def _check(
        self, u: Tensor, extras: Sequence[Tensor | None], w: Tensor | None, h0: Tensor | None, mask: Tensor | None
    ) -> None:
        if u.dtype not in _DTYPES:
            raise ConfigError(f"{self.name}: u must be float32, bfloat16, float16 or float64, not {u.dtype}")
        if u.dim() != 3 or u.numel() == 0:
            raise ConfigError(f"{self.name}: u must be (T, B, d) with every size at least 1, not {tuple(u.shape)}")
        steps, rows, width = u.shape
        state = torch.float64 if u.dtype == torch.float64 else torch.float32
        same = {u.dtype}
        wanted: list[tuple[str, Tensor | None, tuple[int, ...], set[torch.dtype]]] = [
            *((name, e, (steps, rows, width), same) for name, e in zip(self.extras, extras, strict=True)),
            ("w", w, (width, width), same | {state}),
            ("h0", h0, (rows, width), same | {state}),
        ]
        if mask is not None:
            wanted.append(("mask", mask, (steps, rows), {torch.bool}))
        for name, x, shape, dtypes in wanted:
            if not isinstance(x, Tensor):
                raise ConfigError(f"{self.name}: {name} must be a tensor {shape}, not {x!r}")
            if x.shape != shape:
                raise ConfigError(
                    f"{self.name}: {name} must be {shape} beside u {tuple(u.shape)}, not {tuple(x.shape)}"
                )
            if x.dtype not in dtypes:
                names = " or ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
                raise ConfigError(f"{self.name}: {name} must be {names} beside u in {u.dtype}, not {x.dtype}")
            if x.device != u.device:
                raise ConfigError(f"{self.name}: {name} is on {x.device}, u on {u.device}; move them together")

    def _register(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        count = len(self.extras)
        op, op_backward = f"dense_{self.name}", f"dense_{self.name}_backward"
        es = "".join(f"Tensor e{i}, " for i in range(count))
        _library.define(
            f"{op}(Tensor u, {es}Tensor w, Tensor h0, Tensor? mask, str backend) -> (Tensor, Tensor, Tensor, Tensor)"
        )
        _library.define(
            f"{op_backward}(Tensor gy, Tensor g_last, {es}Tensor w, Tensor history, Tensor a, Tensor? mask, str backend)"
            f" -> ({', '.join(['Tensor'] * (2 + count))})"
        )
        _library.impl(op, self._run_forward, "CompositeExplicitAutograd")
        _library.impl(op_backward, self._run_backward, "CompositeExplicitAutograd")
        register_fake(f"elman::{op}", self._fake_forward, lib=_library)
        register_fake(f"elman::{op_backward}", self._fake_backward, lib=_library)
        register_autograd(f"elman::{op}", self._differentiate, setup_context=self._save, lib=_library)
        return getattr(torch.ops.elman, op).default, getattr(torch.ops.elman, op_backward).default

    # Outputs of the op: y (T, B, d), h_T (B, d), and, for the backward alone, history (T+1, B, d) and a (T, B, d) or empty.

    def _run_forward(self, u: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        *extras, w, h0, mask, backend = rest
        if backend == "torch":
            with torch.autocast(u.device.type, enabled=False):
                up = [x.to(h0.dtype) for x in (u, *extras, w)]
                y, history, a = dense_torch.forward(
                    self.update, self.readout, up[0], up[1:-1], up[-1], h0, mask
                )  # fmt: skip
            return y.to(u.dtype), history[-1].clone(), history, a
        self._check_native(backend, u)
        if backend == "cuda":
            y, last, history = dense_cuda.forward(self, u, extras, w.to(u.dtype), h0, mask)
        else:
            y, last, history = dense_host.forward(self, u, extras, w.to(u.dtype), h0, mask)
        return y, last, history, u.new_empty(0)

    def _run_backward(self, gy: Tensor, g_last: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        *extras, w, history, a, mask, backend = rest
        if backend == "torch":
            up = [x.to(history.dtype) for x in (gy, *extras, w)]
            da, dextras, dh0 = dense_torch.backward(
                self.update, self.readout, up[0], g_last, up[1:-1], up[-1], history, a, mask
            )
        elif backend == "cuda":
            da, dextras, dh0 = dense_cuda.backward(self, gy, g_last, extras, w.to(history.dtype), history, mask)
        else:
            da, dextras, dh0 = dense_host.backward(self, gy, g_last, extras, w.to(history.dtype), history, mask)
        return da, dh0, *(d.to(e.dtype) for d, e in zip(dextras, extras, strict=True))

    def _fake_forward(self, u: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        *_, h0, _mask, backend = rest
        steps, rows, width = u.shape
        stored = h0.dtype if backend == "torch" else u.dtype
        a_shape = (steps, rows, width) if backend == "torch" and self.update is not None else (0,)
        return (
            u.new_empty(steps, rows, width),
            h0.new_empty(rows, width),
            u.new_empty(steps + 1, rows, width, dtype=stored),
            u.new_empty(a_shape, dtype=stored),
        )

    def _fake_backward(self, gy: Tensor, g_last: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        *extras, _w, history, _a, _mask, _backend = rest
        return (
            history.new_empty(gy.shape),
            g_last.new_empty(g_last.shape),
            *(e.new_empty(gy.shape) for e in extras),
        )

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        u, *extras, w, _h0, mask, backend = inputs
        _, last, history, a = output
        ctx.set_materialize_grads(False)  # a gradient of the history, which nobody sees, need not be filled with zeros
        ctx.save_for_backward(*extras, w, history, a, mask)
        ctx.backend, ctx.dtype, ctx.state_dtype = backend, u.dtype, last.dtype

    def _differentiate(self, ctx: Any, gy: Tensor | None, g_last: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                f"{self.name}: gradients of gradients (create_graph=True) exist only with backend='reference'"
            )
        *extras, w, history, a, mask = ctx.saved_tensors
        steps, (rows, width) = history.shape[0] - 1, history.shape[1:]
        if gy is None:
            gy = history.new_zeros(steps, rows, width, dtype=ctx.dtype)
        if g_last is None:
            g_last = history.new_zeros(rows, width, dtype=ctx.state_dtype)
        da, dh0, *dextras = self._backward(gy, g_last, *extras, w, history, a, mask, ctx.backend)
        dw = None
        if ctx.needs_input_grad[1 + len(extras)]:  # one product over all time steps and rows
            before, flat = history[:-1].reshape(steps * rows, width), da.reshape(steps * rows, width)
            dw = _product(flat.t(), before, w.dtype)
        return da.to(ctx.dtype), *dextras, dw, dh0, None, None

    def _check_native(self, backend: str, like: Tensor) -> None:
        if backend not in ("host", "cuda"):
            raise ConfigError(f"{self.name}: backend must be auto, torch, cuda, host or reference, not {backend!r}")
        if like.device.type != ("cpu" if backend == "host" else "cuda"):
            raise KernelError(f"{self.name}: backend {backend!r} cannot run on tensors on {like.device}")


@torch.compiler.assume_constant_result
def _choose(name: str, index: int, dtype: torch.dtype, rows: int, width: int) -> Backend:
    """The back end for "auto" on a GPU, for the kernel of that name.

    The length does not matter to it, and a choice holds for the process: `torch.compile` evaluates this while it traces, and
    takes only plain values as arguments.
    """
    kernel = _kernels[name]
    key = (index, dtype, rows, width, torch.is_grad_enabled(), mode())
    if key not in kernel.chosen:
        kernel.chosen[key] = "torch" if mode() == "off" else _prepare(kernel, index, dtype, rows, width)
    return kernel.chosen[key]


def _prepare(kernel: DenseKernel, index: int, dtype: torch.dtype, rows: int, width: int) -> Backend:
    """Compile and load, and verify if gradients are wanted."""
    sizes = (VERIFIED_STEPS, rows, width)
    with torch.cuda.device(index):
        plan = load_or_warn(kernel.name, lambda: dense_cuda.prepare(kernel, sizes, dtype))
        if plan is not None and torch.is_grad_enabled():
            ensure_verified(kernel.spec(), Case(dict(zip("TBd", sizes, strict=True)), dtype), plan)
    return "torch" if plan is None else "cuda"


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b in `dtype`; 16-bit factors are accumulated and returned in float32 where that is asked for.

    A long sum in float32 is made of shorter ones: over 131,072 places one after another rounding alone comes to 7e-6 of it.
    """
    if a.is_cuda and dtype == torch.float32 and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32)
    places = b.shape[0]
    if places <= _LONGEST_SUM or a.dtype != torch.float32:
        return (a @ b).to(dtype)
    total = a[:, :_LONGEST_SUM] @ b[:_LONGEST_SUM]
    for first in range(_LONGEST_SUM, places, _LONGEST_SUM):
        part = slice(first, first + _LONGEST_SUM)
        total = torch.addmm(total, a[:, part], b[part])
    return total.to(dtype)
