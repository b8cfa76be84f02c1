"""The matrix-state op through its compiled modules: memory in, memory out. B batch, T time, H heads, N rows, V columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from elman_core.kernels import launch
from elman_core.kernels.family import Family, Row
from elman_core.kernels.runtime import compute_dtype
from elman_core.kernels.spec import Target
from elman_core.registry.errors import KernelError

from . import modules
from .modules import Form, MatrixCell, Size

FAMILY = Family(
    "matrix",
    sizes={"B": "batch", "T": "steps", "H": "heads"},
    functions={"forward": "q k line s1 o", "backward": "q k line saved dy ds0 dq dk dline"},
    members=(
        Row("q", "BT?N", strides="T"), Row("k", "BT?N", strides="T"), Row("vector", "BTHN", names="vectors", strides="T"),
        Row("line", "BT?V", names="lines", strides="T"), Row("scalar", "BTH", "either", names="scalars", strides="T"),
        Row("param", "HV", "compute", names="params"), Row("a_log", "H", "compute"), Row("dt_bias", "H", "compute"),
        Row("mask", "BT", "bool"), Row("s0", "BHNV", "compute"), Row("s1", "BHNV", "compute"), Row("o", "BTHV"),
        Row("saved", None, "either"), Row("dy", "BTHV"), Row("ds1", "BHNV", "compute"), Row("ds0", "BHNV", "compute"),
        Row("dq", "BTHN", strides="T"), Row("dk", "BTHN", strides="T"), Row("dvector", "BTHN", names="vectors", strides="T"),
        Row("dline", "BTHV", names="lines", strides="T"), Row("dscalar", "BTH", "either", names="scalars", strides="T"),
        Row("dparam", "?HV", "compute", names="params"), Row("dhead", None, "compute"), Row("da_log", None, "compute"),
        Row("ddt_bias", None, "compute"), Row("parts", None, "compute"),
    ),
    numbers="shared interval state_line state_row stream",
)  # fmt: skip
WORKSPACE = 512 << 20  # bytes: the limit of the shares of a head's parts; larger batches run in slices


@dataclass(frozen=True)
class Constants:
    """The arguments of a call that are no tensors. heads: H. rows: N. form: as text. backend: "cuda" or "host"."""

    cell: MatrixCell
    heads: int
    rows: int
    form: str
    backend: Target


@cache
def load(cell: MatrixCell, target: Target, size: Size, index: int | None) -> Any:
    """The compiled module for the current device, built if need be. Raises as `modules.extension` and `launch.opened`.

    Args:
        index: of the device; None for a CPU, on which "cuda" is emulated.
    """
    library = launch.opened(modules.extension(cell, target, size), FAMILY, index is None)
    if index is not None:
        most: Any = torch.cuda.get_device_properties(index)
        need = library.info()[1]
        if need > most.shared_memory_per_block_optin:
            raise KernelError(
                f"{cell.name}: N={size.rows} V={size.columns} in {size.dtype} needs {need} bytes of shared memory a block, "
                f"this GPU has {most.shared_memory_per_block_optin}; smaller N or 16-bit storage need less"
            )
    return library


def columns(cell: MatrixCell, q: Tensor, v: Tensor | None, heads: int, rows: int) -> int:
    """V; in the fused form q also holds k, the vectors and all lines, and v is None."""
    keys = 2 + len(cell.vectors)
    return (q.shape[2] // heads - keys * rows) // len(cell.lines) if v is None else v.shape[3]


def forward(of: Constants, state: Tensor | None, keep: bool, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(o (B, T, H, V), S_T (B, H, N, V), and the tensor of `_saved` for the backward, empty without `keep`).

    Args:
        state: S_0 or None. keep: whether a backward will follow.
        given: q, k, vectors, lines, scalars, params, mask, a_log, dt_bias of the op.
    """
    module, batched, fixed, _ = _prepare(of, *given)
    q, (B, T, H, N, V) = batched["q"], _sizes(of, batched)
    o, last = q.new_empty(B, T, H, V), q.new_empty(B, H, N, V, dtype=compute_dtype(q))
    saved = _saved(of, q, B, T, V) if keep else q.new_empty(0)
    state = launch.whole(state)
    with launch.on(q):
        module.run("forward", **batched, **fixed, s0=state, s1=last, o=o, saved=saved if keep else None)
    return o, last, saved


def backward(of: Constants, dy: Tensor, ds1: Tensor | None, saved: Tensor, *given: Any) -> tuple[Tensor, ...]:
    """Gradients of (q, k, vectors, lines, scalars, params, S_0, a_log, dt_bias); empty for an input that was not given.

    In the fused form the first is that of q, k, vectors and lines, (B, T, C), or, if `beside`, of these and the first scalar,
    (B, T, C + H), as one product of all projections needs them.

    Args:
        dy, ds1: gradients of o and of S_T. saved, given: as in `forward`.
    """
    module, batched, fixed, packed = _prepare(of, *given)
    q, scalars, count, (B, T, H, N, V) = batched["q"], batched["scalar"], len(fixed["param"]), _sizes(of, batched)
    made, (dq, dk, *dvectors), dlines, dscalars = _room(of, module, batched, packed)
    dy, ds0 = launch.aligned(dy.to(q.dtype), 16).contiguous(), q.new_empty(B, H, N, V, dtype=compute_dtype(q))
    batched |= {"dy": dy, "ds1": launch.whole(ds1), "saved": saved, "ds0": ds0}
    batched |= {"dq": dq, "dk": dk, "dvector": dvectors, "dline": dlines, "dscalar": dscalars}
    parts, _, width, _ = module.info()
    dheads: list[Tensor] = []
    dparams: list[Tensor] = []
    for batch in _slices(B, parts * T * H * width * 4 if parts > 1 else 0):
        some = {name: part(x, batch) for name, x in batched.items()}
        each = len(some["q"]) if of.backend == "cuda" else 1  # the host adds up over the batch
        dparam = q.new_empty(count, each, H, V, dtype=compute_dtype(q))
        space = q.new_empty(parts * each * T * H * width, dtype=torch.float32) if parts > 1 else None
        # Shares of the gradients of A_log and dt_bias; the host fills them with zeros first.
        dhead = None if fixed["a_log"] is None else fixed["a_log"].new_empty(parts, 2, each, H)
        with launch.on(q):
            module.run(
                "backward", **some, **fixed, dparam=list(dparam), dhead=dhead, parts=space,
                da_log=None if dhead is None else dhead[0, 0], ddt_bias=None if dhead is None else dhead[0, 1],
            )  # fmt: skip
        dheads += [] if dhead is None else [dhead.sum((0, 2))]
        dparams += [dparam.sum(1)] if count else []
        del space
    nothing = q.new_empty(0)
    if packed is not None:
        whole = beside(packed, scalars)
        if made is None:
            made = torch.cat(
                [*(x.flatten(2) for x in (dq, dk, *dvectors, *dlines)), *(dscalars[:1] if whole else [])], -1
            )
        dq, dk, dvectors, dlines = made, nothing, *([q.new_empty(0) for _ in some] for some in (dvectors, dlines))
        dscalars = [q.new_empty(0), *dscalars[1:]] if whole else dscalars
    else:  # each head has given its share of what all share
        pairs = zip((q, batched["k"], *batched["line"]), (dq, dk, *dlines), strict=True)
        dq, dk, *dlines = (d if x.shape == d.shape else d.sum(2, keepdim=True) for x, d in pairs)
    dscalars += [q.new_empty(0) for _ in of.cell.scalars[len(dscalars) :]]
    of_params = [x.clone() for x in sum(dparams[1:], dparams[0])] if dparams else []
    da_log, ddt_bias = (x.clone() for x in (sum(dheads[1:], dheads[0]) if dheads else (nothing, nothing)))
    return dq, dk, *dvectors, *dlines, *dscalars, *of_params, ds0, da_log, ddt_bias


def _sizes(of: Constants, batched: Mapping[str, Any]) -> tuple[int, int, int, int, int]:
    """(B, T, H, N, V)."""
    B, T, _, V = batched["line"][0].shape
    return B, T, of.heads, of.rows, V


def _saved(of: Constants, q: Tensor, B: int, T: int, V: int) -> Tensor:
    """Memory for the states before every segment of `interval` steps, (B, H, segments, V, N) in float32 or float64.

    With N > 24 and tensor cores: a row for each batch element, in the dtype of q, with these states and the retrieved values of
    every step, (T, H, V), rounded up to a multiple of 8.
    """
    H, N, bits = of.heads, of.rows, 8 * q.element_size()
    segments = -(-T // of.cell.interval(N, q, of.backend, of.form))
    if N > 24 and of.cell.tensor(N, bits, of.backend):
        made = q.new_empty(B, ((used := H * V * (segments * N + T)) + 7) // 8 * 8)
        if used % 8:
            made[:, used:] = 0  # outputs of an operator are compared as a whole
        return made
    return q.new_empty(B, H, segments, V, N, dtype=compute_dtype(q))


def fake_forward(cell: MatrixCell, q: Tensor, _k: Any, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    *_, heads, rows, form, keep, backend = rest
    B, T, V = *q.shape[:2], columns(cell, q, rest[len(cell.vectors)], heads, rows)
    saved = _saved(Constants(cell, heads, rows, form, backend), q, B, T, V) if keep else q.new_empty(0)
    return q.new_empty(B, T, heads, V), q.new_empty(B, heads, rows, V, dtype=compute_dtype(q)), saved


def fake_backward(cell: MatrixCell, _dy: Any, _ds1: Any, q: Tensor, k: Any, *rest: Any) -> tuple[Tensor, ...]:
    *named, _mask, a_log, dt_bias, _saved, heads, rows, _form, _backend = rest
    first = len(cell.packed)
    V = columns(cell, q, named[first - 1], heads, rows)

    def like(x: Any) -> Tensor:
        return q.new_empty(0) if x is None else x.new_empty(x.shape)

    ds0 = q.new_empty(q.shape[0], heads, rows, V, dtype=compute_dtype(q))
    dq, gradients = like(q), [like(x) for x in named]
    if named[0] is None and beside(q, named[first : first + len(cell.scalars)]):
        dq, gradients[first] = q.new_empty(*q.shape[:2], q.shape[2] + heads), q.new_empty(0)
    return dq, like(k), *gradients, ds0, like(a_log), like(dt_bias)


def _prepare(
    of: Constants, q: Tensor, k: Tensor | None, *rest: Any
) -> tuple[Any, dict[str, Any], dict[str, Any], Tensor | None]:
    """The module; the arguments of both directions, per row of the batch and for all rows; and the packed inputs.

    The kernel can read every tensor in place: they are separate, or q, k, vectors and lines are slices of one tensor.
    """
    *named, mask, a_log, dt_bias = rest
    H, N, cell = of.heads, of.rows, of.cell
    first, count = len(cell.packed), len(cell.vectors)
    lines, scalars = named[:first], named[first : len(named) - len(cell.params)]
    V = columns(cell, q, named[first - 1], H, N)
    with launch.on(q):
        module = load(cell, of.backend, Size(N, V, q.dtype, of.form), q.device.index)
    align = module.info()[3] if of.backend == "cuda" else 0
    packed, keys = None, (q, k, *lines)
    if k is None:
        packed = launch.aligned(q, 0)
        keys = tuple(
            x.unflatten(-1, (H, -1)) for x in packed.split([H * N] * (2 + count) + [H * V] * len(cell.lines), -1)
        )
    q, k, *rows = (launch.aligned(x, align) for x in keys)
    batched = {
        "q": q, "k": k, "vector": rows[:count], "line": rows[count:],
        "scalar": [launch.aligned(x, 0) for x in scalars if x is not None], "mask": launch.whole(mask),
    }  # fmt: skip
    fixed = {
        "param": [x.contiguous() for x in named[len(named) - len(cell.params) :]], "a_log": a_log, "dt_bias": dt_bias,
        "shared": Form.parse(of.form).shared, "interval": cell.interval(N, q, of.backend, of.form),
        "state_line": 1, "state_row": V, "stream": launch.stream(q),
    }  # fmt: skip
    return module, batched, fixed, packed


def beside(packed: Tensor, scalars: Sequence[Tensor | None]) -> bool:
    """Whether the gradient of the first scalar (B, T, H) is in the same rows as that of the packed inputs, behind it."""
    first = scalars[0] if scalars else None
    return first is not None and first.dtype == packed.dtype and first.shape[2] % 8 == 0


def _room(
    of: Constants, module: Any, batched: Mapping[str, Any], packed: Tensor | None
) -> tuple[Tensor | None, list[Tensor], list[Tensor], list[Tensor]]:
    """Memory for the gradients of q, k and vectors, of lines, of scalars: slices of one tensor if the kernel can write them."""
    q, (B, T, H, N, V) = batched["q"], _sizes(of, batched)
    keys, lines = 2 + len(batched["vector"]), len(batched["line"])
    dscalars = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in batched["scalar"]]
    if packed is not None and of.backend == "cuda":
        behind = H if beside(packed, batched["scalar"]) else 0
        widths = [H * N] * keys + [H * V] * lines + [behind]
        if sliceable(widths, q.element_size(), module.info()[3]):
            made = packed.new_empty(B, T, sum(widths))
            *parts, first = made.split(widths, -1)
            by_head = [launch.evenly(x.unflatten(-1, (H, -1))) for x in parts]
            return made, by_head[:keys], by_head[keys:], [first, *dscalars[1:]] if behind else dscalars
    dkeys, dlines = ([q.new_empty(B, T, H, n) for _ in range(m)] for n, m in ((N, keys), (V, lines)))
    return None, dkeys, dlines, dscalars


def _slices(batch: int, bytes_a_row: int) -> Sequence[slice | None]:
    """The batch in slices of one size, the last at most smaller, whose workspace fits; None if the whole batch fits."""
    slices = -(-batch // max(1, WORKSPACE // bytes_a_row)) if bytes_a_row else 1
    each = -(-batch // slices)
    return [slice(first, min(batch, first + each)) for first in range(0, batch, each)] if slices > 1 else [None]


def sliceable(widths: Sequence[int], size: int, align: int) -> bool:
    """Whether slices of these widths of one tensor's rows all start aligned; the last width is the scalar's."""
    starts = [*accumulate(widths[:-1]), sum(widths)]
    return all(start * size % align == 0 for start in (starts[:-2] + starts[-1:]))


def part(x: Any, rows: slice | None) -> Any:
    """These rows of the batch, or all, of a tensor, of each tensor in a list, or of None."""
    if rows is None or x is None:
        return x
    return [each[rows] for each in x] if isinstance(x, list) else x[rows]
