"""The matrix-state op through its compiled modules: memory in, memory out. B batch, T time, H heads, N rows, V columns."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from elman_core.kernels.runtime import compute_dtype
from elman_core.kernels.spec import Target
from elman_core.registry.errors import KernelError

from . import native
from .modules import MatrixCell, Size, interval
from .native import address, view

WORKSPACE = 256 << 20  # bytes: what the shares of a head's parts may take; larger batches are walked in slices
Load = Callable[[Target, Size], Any]


@dataclass(frozen=True)
class Form:
    """What of a call is no tensor.

    Attributes:
        heads: H. rows: N. text: `Size.form`. backend: "cuda" or "host".
    """

    cell: MatrixCell
    heads: int
    rows: int
    text: str
    backend: Target


@dataclass
class Inputs:
    """The inputs as a kernel reads them; apart from each other, or q, k and the lines all slices of one tensor.

    Attributes:
        q, k: (B, T, H, N), or (B, T, 1, N) where all heads share it. lines: (B, T, H, V) each. scalars: (B, T, H), those
            given. params: (H, V). mask: (B, T). a_log, dt_bias: (H).
        packed: the one tensor (B, T, C) that q, k and the lines are slices of, or None.
    """

    q: Tensor
    k: Tensor
    lines: list[Tensor]
    scalars: list[Tensor]
    params: list[Tensor]
    mask: Tensor | None
    a_log: Tensor | None
    dt_bias: Tensor | None
    packed: Tensor | None

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """(B, T, H, N, V)."""
        B, T, H, V = self.lines[0].shape
        return B, T, H, self.q.shape[3], V

    def call(self, batch: slice = slice(None)) -> native.Call:
        """What a launch is told of these rows of the batch."""
        call, (_, _, H, N, V) = native.Call(), self.sizes
        call.batch, call.steps, call.heads = self.lines[0][batch].shape[:3]
        call.lines, call.scalars, call.params = len(self.lines), len(self.scalars), len(self.params)
        call.q, call.k = view(self.q[batch]), view(self.k[batch])
        call.q_head, call.k_head = (N if x.shape[2] == H else 0 for x in (self.q, self.k))
        for to, given in ((call.line, self.lines), (call.scalar, self.scalars)):
            for i, x in enumerate(given):
                to[i] = view(x[batch])
        for i, x in enumerate(self.params):
            call.param[i] = address(x)
        call.a_log, call.dt_bias = address(self.a_log), address(self.dt_bias)
        call.mask = address(native.part(self.mask, batch))
        call.state_line, call.state_row = 1, V
        if self.q.is_cuda:
            call.stream = torch.cuda.current_stream(self.q.device).cuda_stream
        return call


def columns(q: Tensor, v: Tensor | None, heads: int, rows: int, lines: int) -> int:
    """V; in the fused form q holds k and all lines, too, and v is None."""
    return (q.shape[2] // heads - 2 * rows) // lines if v is None else v.shape[3]


def forward(load: Load, form: Form, state: Tensor | None, keep: bool, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(o (B, T, H, V), S_T (B, H, N, V), what the backward alone needs (`_saved`), or empty).

    Args:
        load: compiles and loads a module. state: S_0 or None. keep: whether a backward will follow.
        given: q, k, lines, scalars, params, mask, a_log, dt_bias of the op.
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
    """Gradients of (q, k, lines, scalars, params, S_0, a_log, dt_bias); empty where there is nothing to differentiate.

    In the fused form the first is of q, k and all lines, (B, T, C), and where `beside` says so of the first scalar too,
    (B, T, C + H): as one product of all projections wants them.

    Args:
        dy, ds1: gradients of o and of S_T. saved, given: as of `forward`.
    """
    module, inputs = _prepare(load, form, *given)
    q, (B, T, H, N, V) = inputs.q, inputs.sizes
    dy = native.aligned(dy.to(q.dtype), 16)
    dy = dy if dy.is_contiguous() else dy.contiguous()
    ds1 = None if ds1 is None else ds1.contiguous()
    packed, dq, dk, dlines, dscalars = _room(form, module, inputs)
    ds0 = q.new_empty(B, H, N, V, dtype=compute_dtype(q))
    parts = native.info(module)[0] if form.backend == "cuda" else 1
    heads: list[Tensor] = []
    params: list[Tensor] = []
    for batch in _slices(B, parts * T * H * (2 * N + 2) * 4 if parts > 1 else 0):
        call = inputs.call(batch)
        call.dy, call.ds1, call.ds0 = address(dy[batch]), address(native.part(ds1, batch)), address(ds0[batch])
        call.saved, call.dq, call.dk = address(saved[batch]), view(dq[batch]), view(dk[batch])
        for to, made in ((call.dline, dlines), (call.dscalar, dscalars)):
            for i, x in enumerate(made):
                to[i] = view(x[batch])
        count = call.batch if form.backend == "cuda" else 1  # the host adds up over the batch
        dparams = q.new_empty(len(inputs.params), count, H, V, dtype=compute_dtype(q))
        for i, x in enumerate(dparams):
            call.dparam[i] = address(x)
        space = q.new_empty(parts * count * T * H * (2 * N + 2), dtype=torch.float32) if parts > 1 else None
        dhead = _share_of_heads(inputs, call, parts, count)
        call.parts = address(space)
        with native.on(q):
            _say(form, module.elman_matrix_backward(ctypes.byref(call)))
        heads += [] if dhead is None else [dhead.sum((0, 2))]
        params += [dparams.sum(1)] if inputs.params else []
        del space
    nothing = q.new_empty(0)
    if inputs.packed is not None:
        whole = beside(inputs.packed, inputs.scalars)
        if packed is None:
            packed = torch.cat([*(x.flatten(2) for x in (dq, dk, *dlines)), *(dscalars[:1] if whole else [])], -1)
        dq, dk, dlines = packed, nothing, [q.new_empty(0) for _ in dlines]
        dscalars = [q.new_empty(0), *dscalars[1:]] if whole else dscalars
    else:  # each head has given its share of what all share
        dq, dk = (d if x.shape == d.shape else d.sum(2, keepdim=True) for x, d in ((inputs.q, dq), (inputs.k, dk)))
    dscalars += [q.new_empty(0) for _ in form.cell.scalars[len(dscalars) :]]
    dparams = sum(params[1:], params[0]) if params else dy.new_empty(0)
    dheads = sum(heads[1:], heads[0]) if heads else None
    da_log, ddt_bias = (nothing.clone(), nothing.clone()) if dheads is None else (x.clone() for x in dheads)
    return dq, dk, *dlines, *dscalars, *(x.clone() for x in dparams), ds0, da_log, ddt_bias


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


def fake_forward(cell: MatrixCell, q: Tensor, _k: Any, v: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    *_, heads, rows, _form, keep, backend = rest
    B, T, V = *q.shape[:2], columns(q, v, heads, rows, len(cell.lines))
    saved = _saved(q, (B, T, heads, rows, V), backend) if keep else q.new_empty(0)
    return q.new_empty(B, T, heads, V), q.new_empty(B, heads, rows, V, dtype=compute_dtype(q)), saved


def fake_backward(cell: MatrixCell, _dy: Any, _ds1: Any, q: Tensor, k: Any, *rest: Any) -> tuple[Tensor, ...]:
    *named, _mask, a_log, dt_bias, _saved, heads, rows, _form, _backend = rest
    V, first = columns(q, named[0], heads, rows, len(cell.lines)), len(cell.lines)

    def like(x: Any) -> Tensor:
        return q.new_empty(0) if x is None else x.new_empty(x.shape)

    ds0 = q.new_empty(q.shape[0], heads, rows, V, dtype=compute_dtype(q))
    dq, gradients = like(q), [like(x) for x in named]
    if named[0] is None and beside(q, named[first : first + len(cell.scalars)]):
        dq, gradients[first] = q.new_empty(*q.shape[:2], q.shape[2] + heads), q.new_empty(0)
    return dq, like(k), *gradients, ds0, like(a_log), like(dt_bias)


def _prepare(load: Load, form: Form, q: Tensor, k: Tensor | None, *rest: Any) -> tuple[Any, Inputs]:
    """The module, and the inputs where it can read them: copied only if they do not lie so already."""
    *named, mask, a_log, dt_bias = rest
    H, N, cell = form.heads, form.rows, form.cell
    lines, scalars = named[: len(cell.lines)], named[len(cell.lines) : len(named) - len(cell.params)]
    V = columns(q, lines[0], H, N, len(lines))
    with native.on(q):
        module = load(form.backend, Size(N, V, q.dtype, form.text))
    align = native.info(module)[3] if form.backend == "cuda" else 0
    packed, keys = None, (q, k, *lines)
    if k is None:
        packed = native.aligned(q, 0)
        keys = tuple(x.unflatten(-1, (H, -1)) for x in packed.split([H * N, H * N, *[H * V] * len(lines)], -1))
    views = [native.aligned(x, align) for x in keys]
    return module, Inputs(
        views[0], views[1], views[2:], [native.aligned(x, 0) for x in scalars if x is not None],
        [x.contiguous() for x in named[len(named) - len(cell.params) :]],
        None if mask is None else mask.contiguous(), a_log, dt_bias, packed,
    )  # fmt: skip


def beside(packed: Tensor, scalars: Sequence[Tensor | None]) -> bool:
    """Whether the gradient of the first scalar (B, T, H) stands behind that of the packed inputs, in the same rows."""
    first = scalars[0] if scalars else None
    return first is not None and first.dtype == packed.dtype and first.shape[2] % 8 == 0


def _room(form: Form, module: Any, inputs: Inputs) -> tuple[Tensor | None, Tensor, Tensor, list[Tensor], list[Tensor]]:
    """Room for the gradients of q, k, lines and scalars: slices of one tensor where the kernel can write there in place."""
    q, (B, T, H, N, V) = inputs.q, inputs.sizes
    packed, dscalars = inputs.packed, [_dense(x) for x in inputs.scalars]
    if packed is not None and form.backend == "cuda":
        behind = H if beside(packed, inputs.scalars) else 0
        widths = [H * N, H * N, *[H * V] * len(inputs.lines), behind]
        if native.sliceable(widths, q.element_size(), native.info(module)[3]):
            made = packed.new_empty(B, T, sum(widths))
            *keys, first = made.split(widths, -1)
            dq, dk, *dlines = (x.unflatten(-1, (H, -1)) for x in keys)
            return made, dq, dk, dlines, [first, *dscalars[1:]] if behind else dscalars
    dlines = [q.new_empty(B, T, H, V) for _ in inputs.lines]
    return None, q.new_empty(B, T, H, N), q.new_empty(B, T, H, N), dlines, dscalars


def _dense(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _share_of_heads(inputs: Inputs, call: native.Call, parts: int, count: int) -> Tensor | None:
    """(parts, 2, count, H) for the gradients of A_log and dt_bias, still to be added up; None without them."""
    if inputs.a_log is None:
        return None
    dhead = inputs.a_log.new_empty(parts, 2, count, call.heads)
    call.dhead = address(dhead)
    call.da_log, call.ddt_bias = address(dhead[0, 0]), address(dhead[0, 1])  # on the host, which fills them with zeros
    return dhead


def _slices(batch: int, bytes_a_row: int) -> Iterator[slice]:
    """The batch, in slices whose workspace fits."""
    at_once = max(1, min(batch, WORKSPACE // bytes_a_row)) if bytes_a_row else batch
    for first in range(0, batch, at_once):
        yield slice(first, min(batch, first + at_once))


def _say(form: Form, said: bytes | None) -> None:
    if said is not None:
        raise KernelError(f"kernel {form.cell.name}: {said.decode()}")
