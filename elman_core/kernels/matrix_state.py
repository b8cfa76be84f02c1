"""`MatrixKernel`: one object turns a matrix-state cell into a differentiable op.

The op is the recurrence of H heads, each with a matrix S of N rows (keys) and V independent columns (lines, in C++),

    r = Sᵀ k,   S = phi(keep(r) S + k write(r, v)ᵀ),   o = Sᵀ q

registered with `torch.library` as `elman::matrix_NAME` (and `_backward`), so that FakeTensor, `torch.compile` and CUDA
graphs know it. Back ends:

    cuda       the skeleton of `elman_csrc` (matrix_state.cuh), compiled for each size and dtype at first use: sm_80 and newer
    host       the same cell in C++ loops, in float64 or float32: an instrument of the tests, taken only when asked for
    reference  the variant's own slow function, differentiated by autograd: the truth, the CPU's, and the fallback of a GPU

Two forms share the op. Called, it takes q, k, v, decay and write as the recurrence uses them. `fused` takes projections as they
leave their product (one tensor, sliced by address) and does SiLU, L2 norm and the decay's map inside the kernel.

Shapes: B batch, T time, H heads, N rows, V columns, C = 2 H N + H V.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.library import Library, register_autograd, register_fake

from elman_core.registry.errors import ConfigError, KernelError

from . import build
from .build import Extension
from .first_use import ensure_verified
from .policy import load_or_warn, mode
from .spec import KernelSpec, Target

Backend = Literal["auto", "cuda", "host", "reference"]
Reference = Callable[..., tuple[Tensor, Tensor]]
INTERVAL = 16  # steps between saved states
WORKSPACE = 256 << 20  # bytes: what the shares of a head's parts may take; larger batches are walked in slices
SUPPORTED = "rows N: multiples of 4 from 4 to 128; columns V: 1 to 4096; float32, bfloat16, float16"
_DTYPE_CODES = {torch.float64: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
_CUDA_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_KINDS = {"given": 0, "sigmoid": 1, "mamba": 2}
_library = Library("elman", "FRAGMENT")
_kernels: dict[str, MatrixKernel] = {}


@dataclass(frozen=True)
class Maps:
    """What happens to the inputs before the recurrence. `decay` and `write`: "given", "sigmoid"; `decay` also "mamba"."""

    silu: bool = False
    l2: bool = False
    decay: str = "given"
    write: str = "given"

    def __str__(self) -> str:
        return f"{int(self.silu)}{int(self.l2)}{_KINDS[self.decay]}{_KINDS[self.write]}"

    @staticmethod
    def parse(text: str) -> Maps:
        names = list(_KINDS)
        return Maps(text[0] == "1", text[1] == "1", names[int(text[2])], names[int(text[3])])


@dataclass(frozen=True)
class _Build:
    """What one compiled module is for."""

    rows: int
    columns: int
    dtype: torch.dtype
    linear: bool
    write: bool
    maps: str


class _Call(ctypes.Structure):
    """MatrixCall of matrix_state_call.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "steps", "heads")),
        ("k", ctypes.c_uint64),
        ("q", ctypes.c_uint64),
        ("line", ctypes.c_uint64 * 4),
        ("scalar", ctypes.c_uint64 * 2),
        ("k_step", ctypes.c_int64),
        ("q_step", ctypes.c_int64),
        ("line_step", ctypes.c_int64 * 4),
        ("scalar_step", ctypes.c_int64 * 2),
        *((name, ctypes.c_uint64) for name in ("a_log", "dt_bias", "mask")),
        ("state_line", ctypes.c_int64),
        ("state_row", ctypes.c_int64),
        *((name, ctypes.c_uint64) for name in ("s0", "s1", "o", "saved", "dy", "ds1", "ds0", "dk", "dq")),
        ("dline", ctypes.c_uint64 * 4),
        ("dscalar", ctypes.c_uint64 * 2),
        ("dk_step", ctypes.c_int64),
        ("dq_step", ctypes.c_int64),
        ("dline_step", ctypes.c_int64 * 4),
        ("dscalar_step", ctypes.c_int64 * 2),
        *((name, ctypes.c_uint64) for name in ("dhead", "da_log", "ddt_bias", "parts", "stream")),
    )


class MatrixKernel:
    """The op of one matrix-state cell with a decay and an optional write strength for each head. Make one at module level.

    Args:
        name: of the variant; lower case.
        header: the cell header, as in `elman/matrix_state_cell.h` of `elman_csrc`.
        cell: the C++ template of the cell, "elman::e99::Cell", instantiated with <linear state, write gate>.
        reference: `reference(q, k, v, decay, write, state, mask, *, linear_state) -> (o, state)`.
        fused_reference: as `fused` below, in PyTorch.
    """

    def __init__(self, name: str, *, header: Path, cell: str, reference: Reference, fused_reference: Reference) -> None:
        self.name, self.header, self.cell = name, Path(header), cell
        self.reference, self.fused_reference = reference, fused_reference
        self.chosen: dict[tuple[Any, ...], bool] = {}
        self.op, self._backward_op = self._register()
        _kernels[name] = self

    def __call__(
        self,
        q_BTHN: Tensor,
        k_BTHN: Tensor,
        v_BTHV: Tensor,
        decay_BTH: Tensor,
        write_BTH: Tensor | None = None,
        state_BHNV: Tensor | None = None,
        mask_BT: Tensor | None = None,
        *,
        linear_state: bool = False,
        backend: Backend = "auto",
    ) -> tuple[Tensor, Tensor]:
        """The recurrence, as `reference`.

        Args:
            q_BTHN, k_BTHN, v_BTHV: float32, bfloat16, float16 or float64; any strides.
            decay_BTH, write_BTH: computed with in float32 (float64 for float64). write None is 1.
            state_BHNV: S_0, None is zeros. mask_BT: bool; where False the state is held and o means nothing.
            backend: "auto" or one of the module's docstring.

        Returns:
            o (B, T, H, V) in the dtype of q, S_T (B, H, N, V) in float32 (float64 for float64).

        Raises:
            ConfigError: shapes or dtypes that do not fit together.
            KernelError: a back end asked for that cannot run this.
        """
        if q_BTHN.dim() != 4 or q_BTHN.numel() == 0:
            raise ConfigError(
                f"{self.name}: q must be (B, T, H, N) with every size at least 1, not {tuple(q_BTHN.shape)}"
            )
        B, T, H, N = q_BTHN.shape
        V = v_BTHV.shape[-1]
        self._check(
            q_BTHN, (B, T, H), (B, H, N, V), state_BHNV, mask_BT,
            k=(k_BTHN, (B, T, H, N)), v=(v_BTHV, (B, T, H, V)), decay=(decay_BTH, (B, T, H)), write=(write_BTH, (B, T, H)),
        )  # fmt: skip
        wanted = _Build(N, V, q_BTHN.dtype, linear_state, write_BTH is not None, str(Maps()))
        if self._backend(backend, q_BTHN, wanted) == "reference":
            return self.reference(
                q_BTHN, k_BTHN, v_BTHV, decay_BTH, write_BTH, state_BHNV, mask_BT, linear_state=linear_state
            )
        wide = _wide(q_BTHN.dtype)
        given = [None if x is None else x.to(wide) for x in (decay_BTH, write_BTH, state_BHNV)]
        inputs = (q_BTHN, k_BTHN.to(q_BTHN.dtype), v_BTHV.to(q_BTHN.dtype), *given, mask_BT, None, None)
        return self._run(inputs, N, linear_state, wanted.maps, q_BTHN)

    def fused(
        self,
        qkv_BTC: Tensor,
        decay_BTH: Tensor,
        write_BTH: Tensor | None = None,
        state_BHNV: Tensor | None = None,
        mask_BT: Tensor | None = None,
        *,
        n_state: int,
        silu: bool = True,
        l2_norm: bool = True,
        a_log_H: Tensor | None = None,
        dt_bias_H: Tensor | None = None,
        decay: str = "mamba",
        linear_state: bool = False,
        backend: Backend = "auto",
    ) -> tuple[Tensor, Tensor]:
        """The recurrence from raw projections.

        Args:
            qkv_BTC: q, k (H n_state each) and v (H V), head-major, side by side.
            decay_BTH: for "mamba" a in exp(-exp(A_log) softplus(a + dt_bias)); for "sigmoid" its logit; for "given" the decay.
            write_BTH: the logit of the write strength; None is strength 1.
            silu: of q, k and v. l2_norm: of q and k, after it, as x (sum x² + 1e-12)^(-1/2).

        Returns, raises: as a call.
        """
        if qkv_BTC.dim() != 3 or qkv_BTC.numel() == 0:
            raise ConfigError(
                f"{self.name}: qkv must be (B, T, C) with every size at least 1, not {tuple(qkv_BTC.shape)}"
            )
        (B, T, C), H = qkv_BTC.shape, decay_BTH.shape[-1]
        V = C // H - 2 * n_state
        if V < 1 or H * (2 * n_state + V) != C:
            raise ConfigError(
                f"{self.name}: qkv has {C} columns, which {H} heads of 2 x {n_state} keys and V values do not fill"
            )
        if (decay == "mamba") != (a_log_H is not None and dt_bias_H is not None):
            raise ConfigError(f"{self.name}: A_log and dt_bias belong to decay='mamba', and to it alone")
        maps = Maps(silu, l2_norm, decay, "given" if write_BTH is None else "sigmoid")
        self._check(
            qkv_BTC, (B, T, H), (B, H, n_state, V), state_BHNV, mask_BT,
            decay=(decay_BTH, (B, T, H)), write=(write_BTH, (B, T, H)), a_log=(a_log_H, (H,)), dt_bias=(dt_bias_H, (H,)),
        )  # fmt: skip
        wanted = _Build(n_state, V, qkv_BTC.dtype, linear_state, write_BTH is not None, str(maps))
        if self._backend(backend, qkv_BTC, wanted) == "reference":
            return self.fused_reference(
                qkv_BTC, decay_BTH, write_BTH, state_BHNV, mask_BT, n_state=n_state, silu=silu, l2_norm=l2_norm,
                a_log_H=a_log_H, dt_bias_H=dt_bias_H, decay=decay, linear_state=linear_state,
            )  # fmt: skip
        narrow, wide = qkv_BTC.dtype, _wide(qkv_BTC.dtype)
        scalars = (
            decay_BTH.to(wide if decay == "given" else narrow),
            None if write_BTH is None else write_BTH.to(narrow),
        )
        heads = [None if x is None else x.to(wide) for x in (state_BHNV, a_log_H, dt_bias_H)]
        inputs = (qkv_BTC, None, None, *scalars, heads[0], mask_BT, heads[1], heads[2])
        return self._run(inputs, n_state, linear_state, wanted.maps, qkv_BTC)

    def backend(self, device: torch.device | str, rows: int, columns: int) -> str:
        """What "auto" runs at this size, in words; compiles nothing, so before the first use it is what will be tried."""
        device = torch.device(device)
        if device.type != "cuda":
            return "reference"
        if mode() == "off":
            return "reference (ELMAN_KERNELS=off)"
        index = torch.cuda.current_device() if device.index is None else device.index
        made = {
            "cuda" if runs else "reference"
            for (on, size, *_), runs in self.chosen.items()
            if (on, size.rows, size.columns) == (index, rows, columns)
        }
        return " and ".join(sorted(made)) or "cuda, compiled at its first use"

    def extension(self, target: Target) -> Extension:
        """What `kernels.build` compiles, for the size in its header's defaults.

        Raises:
            KernelError: the sources are not installed.
        """
        size = _Build(32, 32, torch.float64 if target == "host" else torch.bfloat16, False, False, str(Maps()))
        return self._extension(target, size)

    def targets(self) -> tuple[Target, ...]:
        """Where `elman_csrc` has a binding of the skeleton; nowhere if it is not installed."""
        if importlib.util.find_spec("elman_csrc") is None:
            return ()
        found: tuple[Target, ...] = ("host", "cuda")
        return tuple(t for t in found if self.extension(t).binding.is_file())

    def spec(self) -> KernelSpec:
        """What `elman verify` checks: give it as `Variant(kernels=(….spec(),))`."""
        from .matrix_spec import make_spec

        return make_spec(self)

    def _extension(self, target: Target, size: _Build) -> Extension:
        if importlib.util.find_spec("elman_csrc") is None:
            raise KernelError("the kernel sources are not installed: type `pip install elman-csrc`")
        import elman_csrc

        short = str(size.dtype).removeprefix("torch.")
        form = f"{int(size.linear)}{int(size.write)}{size.maps}"
        return Extension(
            name=f"{self.name}_matrix_{target}_{short}_{size.rows}x{size.columns}_{form}",
            binding=elman_csrc.get_bindings()
            / ("matrix_state_host.cpp" if target == "host" else "matrix_state_cuda.cu"),
            include=(elman_csrc.get_include(),),
            header=self.header,
            defines=(
                ("ELMAN_CELL", self.cell),
                ("ELMAN_LINEAR", str(int(size.linear))),
                ("ELMAN_WRITE", str(int(size.write))),
                ("ELMAN_DTYPE", str(_DTYPE_CODES[size.dtype])),
                ("ELMAN_ROWS", str(size.rows)),
                ("ELMAN_LINES", str(size.columns)),
                ("ELMAN_SILU", size.maps[0]),
                ("ELMAN_L2", size.maps[1]),
                ("ELMAN_KIND0", size.maps[2]),
                ("ELMAN_KIND1", size.maps[3]),
            ),
        )

    def load(self, target: Target, size: _Build) -> Any:
        """The compiled module, built if need be.

        Raises:
            KernelError: the size or dtype is not supported (the message names what is), or it cannot be built or loaded.
        """
        bad_dtype = size.dtype not in (_CUDA_DTYPES if target == "cuda" else (torch.float64, torch.float32))
        if bad_dtype or not _supported(size.rows, size.columns):
            host = "; the host's are float64 and float32" if target == "host" else ""
            raise KernelError(
                f"{self.name}: no kernel for N={size.rows} V={size.columns} in {size.dtype}. There are: {SUPPORTED}{host}"
            )
        return _load(self, target, size)

    def _check(
        self, like: Tensor, tokens: tuple[int, ...], state_shape: tuple[int, ...], state: Tensor | None,
        mask: Tensor | None, **named: tuple[Tensor | None, tuple[int, ...]],
    ) -> None:  # fmt: skip
        if like.dtype not in _DTYPE_CODES:
            raise ConfigError(f"{self.name}: q must be float32, bfloat16, float16 or float64, not {like.dtype}")
        named |= {"S0": (state, state_shape), "mask": (mask, tokens[:2])}
        for name, (x, shape) in named.items():
            if x is None:
                continue
            if not isinstance(x, Tensor) or x.shape != shape:
                given = tuple(x.shape) if isinstance(x, Tensor) else repr(x)
                raise ConfigError(f"{self.name}: {name} must be {shape} beside q {tuple(like.shape)}, not {given}")
            if x.device != like.device:
                raise ConfigError(f"{self.name}: {name} is on {x.device}, q on {like.device}; move them together")
            if name != "mask" and x.dtype not in _DTYPE_CODES:
                raise ConfigError(f"{self.name}: {name} must be floating point beside q, not {x.dtype}")
        if mask is not None and mask.dtype != torch.bool:
            raise ConfigError(f"{self.name}: mask must be bool, not {mask.dtype}")

    def _backend(self, asked: Backend, like: Tensor, size: _Build) -> Backend:
        if asked == "auto":
            if not like.is_cuda or size.dtype == torch.float64:
                return "reference"
            plain = (size.rows, size.columns, size.dtype, size.linear, size.write, size.maps)
            return "cuda" if _choose(self.name, like.device.index, *plain) else "reference"
        if asked not in ("cuda", "host", "reference"):
            raise ConfigError(f"{self.name}: backend must be auto, cuda, host or reference, not {asked!r}")
        if asked != "reference" and like.device.type != ("cpu" if asked == "host" else "cuda"):
            raise KernelError(f"{self.name}: backend {asked!r} cannot run on tensors on {like.device}")
        return asked

    def _run(self, inputs: tuple[Any, ...], rows: int, linear: bool, maps: str, like: Tensor) -> tuple[Tensor, Tensor]:
        keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
        o, last, _ = self.op(*inputs, rows, linear, maps, keep, "cuda" if like.is_cuda else "host")
        return o, last

    def _register(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        op = f"matrix_{self.name}"
        inputs = "Tensor q, Tensor? k, Tensor? v, Tensor decay, Tensor? write"
        heads = "Tensor? mask, Tensor? a_log, Tensor? dt_bias"
        _library.define(
            f"{op}({inputs}, Tensor? state, {heads}, int rows, bool linear, str maps, bool keep, str backend)"
            " -> (Tensor, Tensor, Tensor)"
        )
        _library.define(
            f"{op}_backward(Tensor dy, Tensor? ds1, {inputs}, {heads}, Tensor saved, int rows, bool linear, str maps,"
            f" str backend) -> ({', '.join(['Tensor'] * 8)})"
        )
        _library.impl(op, self._forward, "CompositeExplicitAutograd")
        _library.impl(f"{op}_backward", self._backward, "CompositeExplicitAutograd")
        register_fake(f"elman::{op}", _fake_forward, lib=_library)
        register_fake(f"elman::{op}_backward", _fake_backward, lib=_library)
        register_autograd(f"elman::{op}", self._differentiate, setup_context=_save, lib=_library)
        return getattr(torch.ops.elman, op).default, getattr(torch.ops.elman, f"{op}_backward").default

    # Outputs of the op: o (B, T, H, V), S_T (B, H, N, V), and, for the backward alone, the states (B, H, T/16, V, N) or empty.

    def _forward(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, decay: Tensor, write: Tensor | None, state: Tensor | None,
        mask: Tensor | None, a_log: Tensor | None, dt_bias: Tensor | None,
        rows: int, linear: bool, maps: str, keep: bool, backend: str,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        module, call, alive, (B, T, H, N, V) = self._prepare(
            q, k, v, decay, write, mask, a_log, dt_bias, rows, linear, maps, backend
        )
        o, wide = q.new_empty(B, T, H, V), _wide(q.dtype)
        last = q.new_empty(B, H, N, V, dtype=wide)
        segments = -(-T // INTERVAL)
        saved = q.new_empty((B, H, segments, V, N) if keep else (0,), dtype=wide)
        state = None if state is None else state.contiguous()
        call.s0, call.s1, call.o, call.saved = (
            _address(state),
            _address(last),
            _address(o),
            _address(saved) if keep else 0,
        )
        with _on(q):
            _say(self, module.elman_matrix_forward(ctypes.byref(call)))
        del alive
        return o, last, saved

    def _backward(
        self, dy: Tensor, ds1: Tensor | None, q: Tensor, k: Tensor | None, v: Tensor | None, decay: Tensor,
        write: Tensor | None, mask: Tensor | None, a_log: Tensor | None, dt_bias: Tensor | None,
        saved: Tensor, rows: int, linear: bool, maps: str, backend: str,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        module, _, alive, (B, T, H, N, V) = self._prepare(
            q, k, v, decay, write, mask, a_log, dt_bias, rows, linear, maps, backend
        )
        qkv, separate = q, k is not None
        decay, write, mask, (q, k, v) = alive
        wide = _wide(q.dtype)
        dy = _aligned(dy.to(q.dtype), 16)
        dy = dy if dy.is_contiguous() else dy.contiguous()
        ds1 = None if ds1 is None else ds1.contiguous()
        in_place = (
            not separate and backend == "cuda" and _sliceable(qkv.shape[2], H * N, q.element_size(), _info(module)[3])
        )
        packed = qkv.new_empty(qkv.shape) if in_place else None
        if packed is not None:
            dq, dk, dv = (x.unflatten(-1, (H, -1)) for x in packed.split([H * N, H * N, H * V], -1))
        else:
            dq, dk, dv = q.new_empty(B, T, H, N), q.new_empty(B, T, H, N), q.new_empty(B, T, H, V)
        ddecay = torch.empty_like(decay, memory_format=torch.contiguous_format)
        dwrite = None if write is None else torch.empty_like(write, memory_format=torch.contiguous_format)
        ds0 = q.new_empty(B, H, N, V, dtype=wide)
        mamba = Maps.parse(maps).decay == "mamba"
        info = _info(module)
        parts = info[0] if backend == "cuda" else 1
        rows_at_once = B
        if parts > 1:
            rows_at_once = max(1, min(B, WORKSPACE // (parts * T * H * (2 * N + 2) * 4)))
        heads = []
        for first in range(0, B, rows_at_once):
            part = slice(first, min(B, first + rows_at_once))
            call = _inputs(
                q[part], k[part], v[part], decay[part], _part(write, part), _part(mask, part), a_log, dt_bias, backend
            )
            count = call.batch
            space = q.new_empty(parts * count * T * H * (2 * N + 2), dtype=torch.float32) if parts > 1 else None
            dhead = q.new_empty(parts, 2, count, H, dtype=wide) if mamba else None
            if mamba and backend == "host":
                dhead = q.new_zeros(1, 2, 1, H, dtype=wide)
                call.da_log, call.ddt_bias = dhead[0, 0].data_ptr(), dhead[0, 1].data_ptr()
            call.dy, call.ds1, call.ds0 = _address(dy[part]), _address(_part(ds1, part)), _address(ds0[part])
            call.saved = _address(saved[part])
            call.dq, call.dk, call.dline[0], call.dscalar[0] = (_address(x[part]) for x in (dq, dk, dv, ddecay))
            call.dq_step, call.dk_step, call.dline_step[0], call.dscalar_step[0] = (
                dq.stride(1),
                dk.stride(1),
                dv.stride(1),
                H,
            )
            if dwrite is not None:
                call.dscalar[1], call.dscalar_step[1] = _address(dwrite[part]), H
            call.parts, call.dhead = _address(space), _address(dhead)
            with _on(q):
                _say(self, module.elman_matrix_backward(ctypes.byref(call)))
            if dhead is not None:
                heads.append(dhead.sum((0, 2)))
            del space
        dhead = sum(heads[1:], heads[0]) if heads else None
        if not separate:
            packed = torch.cat([x.flatten(2) for x in (dq, dk, dv)], -1) if packed is None else packed
            dq, dk, dv = packed, q.new_empty(0), q.new_empty(0)
        da_log, ddt_bias = (q.new_empty(0), q.new_empty(0)) if dhead is None else (dhead[0].clone(), dhead[1].clone())
        return dq, dk, dv, ddecay, q.new_empty(0) if dwrite is None else dwrite, ds0, da_log, ddt_bias

    def _prepare(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, decay: Tensor, write: Tensor | None, mask: Tensor | None,
        a_log: Tensor | None, dt_bias: Tensor | None, rows: int, linear: bool, maps: str, backend: str,
    ) -> tuple[Any, _Call, tuple[Any, ...], tuple[int, ...]]:  # fmt: skip
        """(module, call with the inputs, (decay, write, mask, (q, k, v)) as the call reads them, sizes)."""
        B, T = q.shape[:2]
        H, N = decay.shape[2], rows
        V = _columns(q, v, decay, N)
        target: Target = "cuda" if backend == "cuda" else "host"
        module = self.load(target, _Build(N, V, q.dtype, linear, write is not None, maps))
        align = _info(module)[3] if target == "cuda" else 0
        if v is None:
            q = _aligned(q, 0)
            views = [_aligned(x.unflatten(-1, (H, -1)), align) for x in q.split([H * N, H * N, H * V], -1)]
        else:
            assert k is not None
            views = [_aligned(x, align) for x in (q, k, v)]
        decay, write = _aligned(decay, 0), None if write is None else _aligned(write, 0)
        mask = None if mask is None else mask.contiguous()
        call = _inputs(views[0], views[1], views[2], decay, write, mask, a_log, dt_bias, backend)
        return module, call, (decay, write, mask, views), (B, T, H, N, V)

    def _differentiate(self, ctx: Any, dy: Tensor | None, ds1: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                f"{self.name}: gradients of gradients (create_graph=True) exist only with backend='reference'"
            )
        q, k, v, decay, write, mask, a_log, dt_bias, saved = ctx.saved_tensors
        rows, linear, maps, backend = ctx.rest
        if dy is None:
            dy = q.new_zeros(ctx.o_shape)
        dq, dk, dv, ddecay, dwrite, ds0, da_log, ddt_bias = self._backward_op(
            dy, ds1, q, k, v, decay, write, mask, a_log, dt_bias, saved, rows, linear, maps, backend
        )
        return (
            dq, None if k is None else dk, None if v is None else dv, ddecay, None if write is None else dwrite,
            ds0 if ctx.has_state else None, None, None if a_log is None else da_log, None if dt_bias is None else ddt_bias,
            None, None, None, None, None,
        )  # fmt: skip


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, decay, write, state, mask, a_log, dt_bias, rows, linear, maps, _keep, backend = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, decay, write, mask, a_log, dt_bias, output[2])
    ctx.rest, ctx.has_state, ctx.o_shape = (rows, linear, maps, backend), state is not None, output[0].shape


def _fake_forward(q: Tensor, _k: Any, v: Any, decay: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    *_, rows, _linear, _maps, keep, _target = rest
    (B, T, H), V = decay.shape, _columns(q, v, decay, rows)
    wide = _wide(q.dtype)
    saved = (B, H, (T + INTERVAL - 1) // INTERVAL, V, rows) if keep else (0,)
    return q.new_empty(B, T, H, V), q.new_empty(B, H, rows, V, dtype=wide), q.new_empty(saved, dtype=wide)


def _fake_backward(
    _dy: Tensor,
    _ds1: Any,
    q: Tensor,
    k: Any,
    v: Any,
    decay: Tensor,
    write: Any,
    _mask: Any,
    a_log: Any,
    dt_bias: Any,
    *rest: Any,
) -> tuple[Tensor, ...]:
    (B, _T, H), rows = decay.shape, rest[1]

    def like(x: Any) -> Tensor:
        return q.new_empty(0) if x is None else x.new_empty(x.shape)

    ds0 = q.new_empty(B, H, rows, _columns(q, v, decay, rows), dtype=_wide(q.dtype))
    return like(q), like(k), like(v), like(decay), like(write), ds0, like(a_log), like(dt_bias)


def _columns(q: Tensor, v: Tensor | None, decay: Tensor, rows: int) -> int:
    """V; in the fused form q holds all three and v is None."""
    return q.shape[2] // decay.shape[2] - 2 * rows if v is None else v.shape[3]


@torch.compiler.assume_constant_result
def _choose(
    name: str, index: int, rows: int, columns: int, dtype: torch.dtype, linear: bool, write: bool, maps: str
) -> bool:
    """Whether the kernel runs for "auto"; verified at the first use in training.

    `torch.compile` evaluates this while it traces, and takes only plain values as arguments.
    """
    kernel, size = _kernels[name], _Build(rows, columns, dtype, linear, write, maps)
    key = (index, size, torch.is_grad_enabled(), mode())
    if key not in kernel.chosen:
        found = None
        if mode() != "off":
            with torch.cuda.device(index):
                found = load_or_warn(f"{kernel.name} N={size.rows} V={size.columns}", lambda: kernel.load("cuda", size))
                if found is not None and torch.is_grad_enabled():
                    from .matrix_spec import first_use_case

                    ensure_verified(kernel.spec(), first_use_case(size), "cuda")
        kernel.chosen[key] = found is not None
    return kernel.chosen[key]


@cache
def _load(kernel: MatrixKernel, target: Target, size: _Build) -> Any:
    extension = kernel._extension(target, size)
    path = build.build(extension, build.local_arch(extension))
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelError(f"kernel {path.name} does not load: {error}; delete it to build it again") from error
    library.elman_matrix_forward.restype = library.elman_matrix_backward.restype = ctypes.c_char_p
    library.elman_matrix_info.restype = None
    if target == "cuda":
        index = torch.cuda.current_device()
        most: Any = torch.cuda.get_device_properties(index)
        need = max(_info(library)[1:3])
        if need > most.shared_memory_per_block_optin:
            raise KernelError(
                f"{kernel.name}: N={size.rows} V={size.columns} in {size.dtype} needs {need} bytes of shared memory a block, "
                f"this GPU has {most.shared_memory_per_block_optin}; smaller N or 16-bit storage need less"
            )
    return library


_infos: dict[int, tuple[int, ...]] = {}


def _info(library: Any) -> tuple[int, ...]:
    """(parts of a head, shared memory of a forward and of a backward block, alignment of rows)."""
    if id(library) not in _infos:
        out = (ctypes.c_int64 * 4)()
        library.elman_matrix_info(out)
        _infos[id(library)] = tuple(out)
    return _infos[id(library)]


def _inputs(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, write: Tensor | None, mask: Tensor | None, a_log: Tensor | None,
    dt_bias: Tensor | None, backend: str,
) -> _Call:  # fmt: skip
    call = _Call()
    (call.batch, call.steps, call.heads), V = decay.shape, v.shape[3]
    call.q, call.k, call.line[0], call.scalar[0] = (_address(x) for x in (q, k, v, decay))
    call.q_step, call.k_step, call.line_step[0], call.scalar_step[0] = (
        q.stride(1),
        k.stride(1),
        v.stride(1),
        decay.stride(1),
    )
    if write is not None:
        call.scalar[1], call.scalar_step[1] = _address(write), write.stride(1)
    call.a_log, call.dt_bias, call.mask = _address(a_log), _address(dt_bias), _address(mask)
    call.state_line, call.state_row = 1, V
    if backend == "cuda":
        call.stream = torch.cuda.current_stream(q.device).cuda_stream
    return call


def _aligned(x: Tensor, align: int) -> Tensor:
    """x itself where a kernel can read it in place (time steps evenly apart, the rest adjacent, rows aligned), else a copy.

    `align` 0 asks for no alignment beyond the elements'. The host takes contiguous tensors only.
    """
    size = x.element_size()
    adjacent = all(x.stride(i) == x.shape[i + 1 :].numel() for i in range(2, x.dim()) if x.shape[i] > 1)
    even = x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)
    far = x.shape[1] == 1 or x.stride(1) >= x.shape[2:].numel()
    apart = align == 0 or (x.data_ptr() % align == 0 and x.stride(1) * size % align == 0)
    if adjacent and even and far and apart and (x.is_cuda or x.is_contiguous()):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _supported(rows: int, columns: int) -> bool:
    return rows % 4 == 0 and 4 <= rows <= 128 and 1 <= columns <= 4096


def _sliceable(columns: int, keys: int, size: int, align: int) -> bool:
    """Whether the slices q, k, v of a (B, T, columns) tensor have rows that start aligned."""
    return columns * size % align == 0 and keys * size % align == 0


def _part(x: Tensor | None, part: slice) -> Tensor | None:
    return None if x is None else x[part]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _on(x: Tensor) -> torch.cuda.device:
    return torch.cuda.device(x.device.index if x.is_cuda else -1)


def _say(kernel: MatrixKernel, said: bytes | None) -> None:
    if said is not None:
        raise KernelError(f"kernel {kernel.name}: {said.decode()}")
