"""Run matrix-state cells in their compiled modules (`elman/matrix_state_call.h` of `elman_csrc`): one for each size, dtype and
form of the call. B batch, T time, H heads, N rows, V columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from elman_core.kernels import build, launch
from elman_core.kernels.build import Extension
from elman_core.kernels.family import Values
from elman_core.kernels.spec import Target
from elman_core.registry.errors import KernelError, KernelUnavailableError

from .spec import FAMILY, Form, MatrixCell, Size, beside

SUPPORTED = "rows N: multiples of 4 from 4 to 128; columns V: 1 to 4096; "
DTYPES = {
    "cuda": (torch.float32, torch.bfloat16, torch.float16), "host": (torch.float64, torch.float32),
    "cpu": (torch.float32, torch.bfloat16),
}  # fmt: skip
_ROWS = (*FAMILY.inputs, *FAMILY.arriving, *FAMILY.gradients, *FAMILY.members)
_BATCHED = {row.name for row in _ROWS if (row.shape or "B")[0] in "B?"}


def extension(cell: MatrixCell, target: Target, size: Size) -> Extension:
    """What is compiled for a size. Raises `KernelError`: no kernel has it (names the sizes that have one), or no source."""
    fits = size.rows % 4 == 0 and 4 <= size.rows <= 128 and 1 <= size.columns <= 4096
    if not fits or size.dtype not in DTYPES[target]:
        known = SUPPORTED + ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES[target])
        raise KernelError(f"{cell.name}: no kernel for N={size.rows} V={size.columns} in {size.dtype}. Known: {known}")
    form = Form.parse(size.form)
    form = replace(form, packed=form.packed and target == "cuda" and not size.step)  # the others test each step
    absent = bool(cell.optional) and not form.arguments[-1]
    declared = {
        "vectors": len(cell.vectors), "lines (v is one)": len(cell.lines), "scalars": len(cell.scalars) - absent,
        "params": len(cell.params), "elementwise": cell.elementwise, "delta": cell.takes_blocks(size.form),
    }  # fmt: skip
    return build.for_target(
        f"{cell.name}_matrix" + "_step" * size.step,
        "matrix_step" if size.step else "matrix_state",
        target,
        f"{size.rows}x{size.columns}",
        form,
        header=cell.header,
        declared=declared,
        CELL=f"{cell.type}<{','.join(str(int(x)) for x in form.arguments)}>" if form.arguments else cell.type,
        DTYPE=size.dtype,
        ROWS=size.rows,
        LINES=size.columns,
        SILU=form.silu,
        L2=form.normalised,
        SHARED=form.shared,
        LINEAR=int(cell.linear(size.form)),
        PACKED=int(form.packed),
        WIDE=form.wide,
        KIND0=form.kinds[0],
        KIND1=form.kinds[1],
        KIND2=(*form.kinds, 0)[2],
    )


def usual(cell: MatrixCell, target: Target, step: bool = False) -> Extension:
    """The module for N = V = 32."""
    form = cell.form(cell.maps[0], [False] * len(cell.options), not cell.optional)
    return extension(cell, target, Size(32, 32, torch.float64 if target == "host" else torch.bfloat16, form, step))


@cache
def load(cell: MatrixCell, target: Target, size: Size, index: int | None) -> Any:
    """The compiled module for the current device, built if need be. Raises as `extension` and `launch.opened`. index: None for
    a CPU, on which "cuda" is emulated."""
    library = launch.opened(extension(cell, target, size), FAMILY, index is None)
    if index is not None:
        most: Any = torch.cuda.get_device_properties(index)
        need = library.info()[0]
        if need > most.shared_memory_per_block_optin:
            raise KernelUnavailableError(
                f"{cell.name}: N={size.rows} V={size.columns} in {size.dtype} needs {need} bytes of shared memory a block, "
                f"this GPU has {most.shared_memory_per_block_optin}; smaller N or 16-bit storage need less"
            )
    return library


def run(cell: MatrixCell, function: str, given: Values, values: Values) -> None:
    """As `Operator` calls it. The kernel reads every input in place: as a tensor of its own, or as a slice of the packed one.
    Raises `KernelError`: the module cannot be built or run."""
    first = given["packed" if "packed" in given else "q"]
    H, N, form, target = (values[name] for name in ("heads", "rows", "form", "backend"))
    V = given["o" if function == "forward" else "dy"].shape[3]
    step = target == "step"
    with launch.on(first):
        module = load(cell, "cuda" if step else target, Size(N, V, first.dtype, form, step), first.device.index)
        align = module.info()[2] if target != "host" else 0
        packed = given.pop("packed", None)
        if packed is not None:
            widths = [H * N] * (2 + len(cell.vectors)) + [H * V] * len(cell.lines)
            keys = _heads(launch.aligned(packed, 0).split(widths, -1), H)
        else:
            keys = [given["q"], given["k"], *given["vector"], *given["line"]]
        given["q"], given["k"], *rows = (launch.aligned(x, align) for x in keys)
        given |= {"vector": rows[: len(cell.vectors)], "line": rows[len(cell.vectors) :]}
        given["scalar"] = [launch.aligned(x, 0) for x in given["scalar"] if x is not None]
        if function == "forward" and H * V % 8 and "kept" in given:
            given["kept"][:, -7:] = 0  # up to 7 are not written, and outputs of an operator are compared whole
        given |= {
            "saved": given.pop("kept", given.pop("states", None)), "shared": Form.parse(form).shared,
            "interval": cell.interval(N, first, target, form), "state_line": 1, "state_row": V,
            "stream": launch.stream(first), "threads": torch.get_num_threads(),
        }  # fmt: skip
        if function == "forward":
            module.run("forward", **given)
        else:
            _backward(cell, module, given, values)


def _heads(parts: Sequence[Tensor], heads: int) -> list[Tensor]:
    return [x.unflatten(-1, (heads, -1)) for x in parts]


def _backward(cell: MatrixCell, module: Any, given: Values, values: Values) -> None:
    """The gradients; those of packed inputs are slices of one tensor if the kernel can write them."""
    _, width, align = module.info()
    dpacked = given.pop("dpacked", None)
    dmamba = given.pop("dmamba", None)
    B, T, H, V = given["dy"].shape
    given["dparam"] = list(given.pop("dparams", ()))
    dscalar = given["dscalar"] = [x for x in given["dscalar"] if x.numel()]
    inside = False
    if dpacked is not None:
        behind = dpacked.shape[2] - values["packed"].shape[2]
        widths = [H * values["rows"]] * (2 + len(cell.vectors)) + [H * V] * len(cell.lines)
        size = dpacked.element_size()
        inside = values["backend"] != "host" and sliceable([*widths, behind], size, align)
        if inside:
            *slices, last = dpacked.split([*widths, behind], -1)
            made = [launch.evenly(x) for x in _heads(slices, H)]
            if behind:
                dscalar[0] = last
        else:
            made = [dpacked.new_empty(B, T, H, n // H) for n in widths]
        given["dq"], given["dk"], *rows = made
        given |= {"dvector": rows[: len(cell.vectors)], "dline": rows[len(cell.vectors) :]}
    parts = _parts(module, B, H, values["backend"])
    slices = _slices(B, parts * T * H * width * 4, workspace(given["dy"].device)) if parts > 1 else [None]
    for i, batch in enumerate(slices):
        dhead = _backward_rows(module, batch, given, dmamba, values["backend"])
        if dmamba is not None and i == 0:
            torch.sum(dhead, (0, 2), out=dmamba)
        elif dmamba is not None:
            dmamba += dhead.sum((0, 2))
    if dpacked is not None and not inside:
        torch.cat([*(x.flatten(2) for x in made), *dscalar[: 1 if behind else 0]], -1, out=dpacked)


def _backward_rows(module: Any, batch: slice | None, given: Values, dmamba: Tensor | None, target: Target) -> Any:
    """Runs these rows of the batch. Returns the shares of the gradients of A_log and dt_bias (parts, 2, rows, H), if any."""
    some = {name: part(x, batch) if name in _BATCHED else x for name, x in given.items()}
    rows, T, H, _ = some["dy"].shape
    parts = _parts(module, rows, H, target)
    space = some["ds0"].new_empty(parts * rows * T * H * module.info()[1]) if parts > 1 else None
    dhead = da_log = ddt_bias = None
    if dmamba is not None:  # the host adds up over the batch, onto zeros that it writes itself
        dhead = dmamba.new_empty(parts, 2, 1 if target == "host" else rows, H)
        da_log, ddt_bias = dhead[0]
    module.run("backward", **some, dhead=dhead, da_log=da_log, ddt_bias=ddt_bias, parts=space)
    return dhead


def _parts(module: Any, rows: int, heads: int, target: Target) -> int:
    """The blocks of a GPU that share a head."""
    return module.ask("parts", rows, heads) if target == "cuda" else 1


def workspace(device: torch.device) -> int:
    """The most bytes for the shares of a head's parts. Larger batches run in slices, which should fill a GPU several times."""
    least = 512 << 20
    return least if device.type == "cpu" else max(least, torch.cuda.get_device_properties(device).total_memory // 64)


def _slices(batch: int, bytes_a_row: int, most: int) -> Sequence[slice | None]:
    """The batch in slices of one size, the last at most smaller, whose workspace fits; None if the whole batch fits."""
    slices = -(-batch // max(1, most // bytes_a_row))
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


def gradients(cell: MatrixCell, values: Values) -> Values:
    """The gradients of the inputs, from the results of a backward: shares of heads and of rows of the batch are added up."""
    scalars = zip(values["scalar"], values["dscalar"], strict=True)
    found: Values = {"scalar": [None if x is None else d for x, d in scalars]}
    packed = values.get("packed")
    if packed is None:
        found |= {"q": values["dq"], "k": values["dk"], "vector": values["dvector"], "line": values["dline"]}
        if cell.shared:
            found |= {n: _shares(values[n], found[n]) for n in "qk"}
            found["line"] = [_shares(x, d) for x, d in zip(values["line"], values["dline"], strict=True)]
    elif beside(packed, values["scalar"]):
        found["packed"], found["scalar"][0] = values["dpacked"].split([packed.shape[2], values["heads"]], -1)
    else:
        found["packed"] = values["dpacked"]
    if cell.params:
        found["param"] = values["dparams"].sum(1).unbind()
    if values["needs"]["S0"]:
        found["S0"] = values["ds0"]
    if values["A_log"] is not None:
        found["A_log"], found["dt_bias"] = values["dmamba"]
    return found


def _shares(x: Tensor, gradient: Tensor) -> Tensor:
    """The gradient of what all heads may share."""
    return gradient if x.shape == gradient.shape else gradient.sum(2, keepdim=True)
