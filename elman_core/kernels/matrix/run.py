"""The matrix-state op through its compiled modules: memory in, memory out. B batch, T time, H heads, N rows, V columns."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from elman_core.kernels.runtime import compute_dtype
from elman_core.kernels.spec import Target
from elman_core.registry.errors import KernelError

from . import native
from .modules import Maps, Size, interval
from .native import address

WORKSPACE = 256 << 20  # bytes: what the shares of a head's parts may take; larger batches are walked in slices
Load = Callable[[Target, Size], Any]


@dataclass(frozen=True)
class Form:
    """What of a call is no tensor.

    Attributes:
        name: of the kernel, for messages. rows: N. linear: no tanh. maps: the string of `Maps`.
            backend: "cuda" or "host".
    """

    name: str
    rows: int
    linear: bool
    maps: str
    backend: Target


@dataclass
class Inputs:
    """The inputs as a kernel reads them; with `k` given apart from q, or all three slices of one tensor.

    Attributes:
        q, k, v: (B, T, H, N), (B, T, H, N), (B, T, H, V). decay, write: (B, T, H). mask: (B, T). a_log, dt_bias: (H).
        packed: the one tensor (B, T, C) that q, k and v are slices of, or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    write: Tensor | None
    mask: Tensor | None
    a_log: Tensor | None
    dt_bias: Tensor | None
    packed: Tensor | None

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """(B, T, H, N, V)."""
        return (*self.q.shape, self.v.shape[3])  # type: ignore[return-value]

    def rows(self, batch: slice) -> Inputs:
        """These rows of the batch."""
        some = native.part
        return Inputs(
            self.q[batch], self.k[batch], self.v[batch], self.decay[batch], some(self.write, batch),
            some(self.mask, batch), self.a_log, self.dt_bias, None,
        )  # fmt: skip

    def call(self) -> native.Call:
        return native.inputs(self.q, self.k, self.v, self.decay, self.write, self.mask, self.a_log, self.dt_bias)


def columns(q: Tensor, v: Tensor | None, decay: Tensor, rows: int) -> int:
    """V; in the fused form q holds all three and v is None."""
    return q.shape[2] // decay.shape[2] - 2 * rows if v is None else v.shape[3]


def forward(load: Load, form: Form, state: Tensor | None, keep: bool, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(o (B, T, H, V), S_T (B, H, N, V), what the backward alone needs (`_saved`), or empty).

    Args:
        load: compiles and loads a module. state: S_0 or None. keep: whether a backward will follow.
        given: q, k, v, decay, write, mask, a_log, dt_bias of the op.
    """
    module, inputs = _prepare(load, form, *given)
    q, (B, T, H, N, V) = inputs.q, inputs.sizes
    o, last = q.new_empty(B, T, H, V), q.new_empty(B, H, N, V, dtype=compute_dtype(q))
    saved = _saved(q, (B, T, H, N, V), form.backend) if keep else q.new_empty(0)
    state = None if state is None else state.contiguous()
    call = inputs.call()
    call.s0, call.s1, call.o, call.saved = address(state), address(last), address(o), address(saved) if keep else 0
    with native.on(q):
        _say(form, module.elman_matrix_forward(ctypes.byref(call)))
    return o, last, saved


def backward(
    load: Load, form: Form, dy: Tensor, ds1: Tensor | None, saved: Tensor, *given: Any
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of (q, k, v, decay, write, S_0, a_log, dt_bias); empty where there is nothing to differentiate.

    In the fused form the first is of all three, (B, T, C), and where `beside` says so of the decay too, (B, T, C + H): as one
    product of all projections wants them.

    Args:
        dy, ds1: gradients of o and of S_T. saved, given: as of `forward`.
    """
    module, inputs = _prepare(load, form, *given)
    q, (B, T, H, N, V) = inputs.q, inputs.sizes
    dy = native.aligned(dy.to(q.dtype), 16)
    dy = dy if dy.is_contiguous() else dy.contiguous()
    ds1 = None if ds1 is None else ds1.contiguous()
    packed, (dq, dk, dv, ddecay) = _room(form, module, inputs)
    dwrite = None if inputs.write is None else torch.empty_like(inputs.write, memory_format=torch.contiguous_format)
    ds0 = q.new_empty(B, H, N, V, dtype=compute_dtype(q))
    parts = native.info(module)[0] if form.backend == "cuda" else 1
    shares = []
    for batch in _slices(B, parts * T * H * (2 * N + 2) * 4 if parts > 1 else 0):
        call = inputs.rows(batch).call()
        call.dy, call.ds1, call.ds0 = address(dy[batch]), address(native.part(ds1, batch)), address(ds0[batch])
        call.saved = address(saved[batch])
        call.dq, call.dk, call.dline[0], call.dscalar[0] = (address(x[batch]) for x in (dq, dk, dv, ddecay))
        call.dq_step, call.dk_step, call.dline_step[0], call.dscalar_step[0] = (
            *(x.stride(1) for x in (dq, dk, dv, ddecay)),
        )
        if dwrite is not None:
            call.dscalar[1], call.dscalar_step[1] = address(dwrite[batch]), H
        count = call.batch
        space = q.new_empty(parts * count * T * H * (2 * N + 2), dtype=torch.float32) if parts > 1 else None
        dhead = _share_of_heads(form, call, q, parts, count, H)
        call.parts = address(space)
        with native.on(q):
            _say(form, module.elman_matrix_backward(ctypes.byref(call)))
        if dhead is not None:
            shares.append(dhead.sum((0, 2)))
        del space
    nothing = q.new_empty(0)
    if inputs.packed is not None:
        whole = beside(inputs.packed, inputs.decay)
        if packed is None:
            packed = torch.cat([*(x.flatten(2) for x in (dq, dk, dv)), *([ddecay] if whole else [])], -1)
        dq, dk, dv, ddecay = packed, nothing, q.new_empty(0), q.new_empty(0) if whole else ddecay
    dheads = sum(shares[1:], shares[0]) if shares else None
    da_log, ddt_bias = (nothing.clone(), nothing.clone()) if dheads is None else (x.clone() for x in dheads)
    return dq, dk, dv, ddecay, q.new_empty(0) if dwrite is None else dwrite, ds0, da_log, ddt_bias


def _saved(q: Tensor, sizes: tuple[int, int, int, int, int], backend: str) -> Tensor:
    """Room for the states before every segment of `interval` steps, (B, H, segments, V, N) in float32 or float64.

    With 16-bit storage and N > 24 on a GPU: a row for each of the batch, in the dtype of q, of
    these states and of what every step retrieved, (T, H, V), to a multiple of 8.
    """
    B, T, H, N, V = sizes
    segments = -(-T // interval(N, 8 * q.element_size(), backend))
    if backend == "cuda" and q.element_size() == 2 and N > 24:
        return q.new_empty(B, (H * V * (segments * N + T) + 7) // 8 * 8)
    return q.new_empty(B, H, segments, V, N, dtype=compute_dtype(q))


def fake_forward(q: Tensor, _k: Any, v: Any, decay: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    *_, rows, _linear, _maps, keep, _backend = rest
    (B, T, H), V = decay.shape, columns(q, v, decay, rows)
    saved = _saved(q, (B, T, H, rows, V), _backend) if keep else q.new_empty(0)
    return q.new_empty(B, T, H, V), q.new_empty(B, H, rows, V, dtype=compute_dtype(q)), saved


def fake_backward(_dy: Tensor, _ds1: Any, q: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    k, v, decay, write, _mask, a_log, dt_bias, _saved, rows, *_ = rest
    B, _T, H = decay.shape

    def like(x: Any) -> Tensor:
        return q.new_empty(0) if x is None else x.new_empty(x.shape)

    ds0 = q.new_empty(B, H, rows, columns(q, v, decay, rows), dtype=compute_dtype(q))
    dq, ddecay = like(q), like(decay)
    if v is None and beside(q, decay):
        dq, ddecay = q.new_empty(*q.shape[:2], q.shape[2] + H), q.new_empty(0)
    return dq, like(k), like(v), ddecay, like(write), ds0, like(a_log), like(dt_bias)


def _prepare(
    load: Load, form: Form, q: Tensor, k: Tensor | None, v: Tensor | None, decay: Tensor, write: Tensor | None,
    mask: Tensor | None, a_log: Tensor | None, dt_bias: Tensor | None,
) -> tuple[Any, Inputs]:  # fmt: skip
    """The module, and the inputs where it can read them: copied only if they do not lie so already."""
    H, N = decay.shape[2], form.rows
    V = columns(q, v, decay, N)
    with native.on(q):
        module = load(form.backend, Size(N, V, q.dtype, form.linear, write is not None, form.maps))
    align = native.info(module)[3] if form.backend == "cuda" else 0
    packed = None
    if v is None:
        packed = native.aligned(q, 0)
        views = [native.aligned(x.unflatten(-1, (H, -1)), align) for x in packed.split([H * N, H * N, H * V], -1)]
    else:
        assert k is not None
        views = [native.aligned(x, align) for x in (q, k, v)]
    return module, Inputs(
        views[0], views[1], views[2], native.aligned(decay, 0), None if write is None else native.aligned(write, 0),
        None if mask is None else mask.contiguous(), a_log, dt_bias, packed,
    )  # fmt: skip


def beside(packed: Tensor, decay: Tensor) -> bool:
    """Whether the gradient of the decay (B, T, H) stands behind that of the packed q, k and v, in the same rows."""
    return decay.dtype == packed.dtype and decay.shape[2] % 8 == 0


def _room(form: Form, module: Any, inputs: Inputs) -> tuple[Tensor | None, tuple[Tensor, ...]]:
    """Room for the gradients of q, k, v and the decay: slices of one tensor where the kernel can write there in place."""
    q, (B, T, H, N, V) = inputs.q, inputs.sizes
    packed, decay = inputs.packed, inputs.decay
    if packed is not None and form.backend == "cuda":
        behind = H if beside(packed, decay) else 0
        if native.sliceable(packed.shape[2] + behind, H * N, q.element_size(), native.info(module)[3]):
            made = packed.new_empty(B, T, packed.shape[2] + behind)
            *keys, ddecay = made.split([H * N, H * N, H * V, behind], -1)
            return made, (*(x.unflatten(-1, (H, -1)) for x in keys), ddecay if behind else _dense(decay))
    return None, (q.new_empty(B, T, H, N), q.new_empty(B, T, H, N), q.new_empty(B, T, H, V), _dense(decay))


def _dense(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _share_of_heads(form: Form, call: native.Call, q: Tensor, parts: int, count: int, heads: int) -> Tensor | None:
    """(parts, 2, count, H) for the gradients of A_log and dt_bias, still to be added up; None without them."""
    if Maps.parse(form.maps).decay != "mamba":
        return None
    if form.backend == "host":
        dhead = q.new_zeros(1, 2, 1, heads, dtype=compute_dtype(q))
        call.da_log, call.ddt_bias = dhead[0, 0].data_ptr(), dhead[0, 1].data_ptr()
        return dhead
    dhead = q.new_empty(parts, 2, count, heads, dtype=torch.float32)
    call.dhead = address(dhead)
    return dhead


def _slices(batch: int, bytes_a_row: int) -> Iterator[slice]:
    """The batch, in slices whose workspace fits."""
    at_once = max(1, min(batch, WORKSPACE // bytes_a_row)) if bytes_a_row else batch
    for first in range(0, batch, at_once):
        yield slice(first, min(batch, first + at_once))


def _say(form: Form, said: bytes | None) -> None:
    if said is not None:
        raise KernelError(f"kernel {form.name}: {said.decode()}")
