"""The problems on which matrix-state kernels are verified. B batch, T time, H heads, N rows (keys), V columns (values)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from elman_core.kernels import build
from elman_core.kernels.build import Extension
from elman_core.kernels.operators import Operator
from elman_core.kernels.spec import Case, Grid, Inputs, KernelSpec, Outputs, Problems, Target

from . import native, portable
from .spec import Maps, MatrixCell, Size

Run = Callable[..., tuple[Tensor, Tensor]]
Way = tuple[Maps, tuple[str, ...]]  # of a call: maps, options that are on and scalars that are given
_WORDS = {"state_BHNV": "S0", "mask_BT": "mask", "starts_BT": "starts", "a_log_H": "A_log", "dt_bias_H": "dt_bias"}


def make_spec(cell: MatrixCell, kernel: Run, fused: Run, apart: Operator, packed: Operator) -> KernelSpec:
    """The spec of a matrix-state kernel: its two forms, and their operators."""

    def call(backend: str, inputs: Inputs, options: Mapping[str, Any]) -> Outputs:
        if backend == "stored":
            o, state = stored(inputs, options)
            return {"o": o, "S": state}
        names = cell.names if "q" in inputs else cell.names[len(cell.packed) :]
        keys = ("q", "k") if "q" in inputs else ("packed",)
        named = {n: options[n] for n in ("n_state", "heads", *cell.options) if n in options}
        named |= {word: inputs.get(n) for word, n in _WORDS.items()} | {"maps": options.get("maps", Maps())}
        o, state = (kernel if "q" in inputs else fused)(
            *(inputs.get(n) for n in (*keys, *names)), backend=backend, **named
        )
        return {"o": o, "S": state}

    def stored(inputs: Inputs, options: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """The reference with all inputs but the scalars rounded to the storage dtype, as separate ops would hand them over."""
        dtype = next(iter(inputs.values())).dtype

        def rounded(*given: Any, **more: Any) -> tuple[Tensor, Tensor]:
            exact = options.get("wide", 0) << 2  # behind q and k
            inputs = enumerate(given[: 2 + len(cell.packed)])
            keys = (x if exact >> i & 1 else x.to(dtype).to(x.dtype) for i, x in inputs)
            return cell.reference(*keys, *given[2 + len(cell.packed) :], **more)

        on = {n: options.get(n, False) for n in cell.options}
        return portable.recurrence(cell, options.get("maps", Maps()), inputs, _sizes(inputs, options), on, rounded)

    def module(target: Target, case: Case) -> Extension:
        return native.extension(cell, target, _size(cell, case.options, case.sizes["N"], case.sizes["V"], case.dtype))

    return apart.spec(
        kernel,
        {},
        ("o", "S"),
        cases=lambda target, grid: list(_cases(cell, target, grid)),
        call=call,
        extension=lambda target: native.usual(cell, target),
        op=lambda *given: _op(cell, apart, packed, *given),
        targets=build.targets(),
        module=module,
        builds=lambda target, _arch, rows, dtypes: _builds(cell, target, rows, dtypes),
        visible=lambda inputs: {"o": mask[..., None, None]} if (mask := inputs["mask"]) is not None else {},
        emulated=_emulated_cases(cell),
        rounded="stored",
    )


def make_step_spec(cell: MatrixCell, whole: KernelSpec, apart: Operator, packed: Operator) -> KernelSpec:
    """The spec of one step. whole: of the recurrence, whose calls take the back end "step"."""

    def drawn(case: Case, generator: torch.Generator) -> Inputs:
        """As for the recurrence, but some rows are held and some begin no document."""
        inputs = whole.make_inputs(case, generator)
        for i, name in enumerate(("mask", "starts")):
            if inputs[name] is not None:
                inputs[name][i::3] = False
        return inputs

    def call(backend: str, inputs: Inputs, options: Mapping[str, Any]) -> Outputs:
        return whole.call("step" if backend in ("cuda", "emulated") else backend, inputs, options)

    def op(_backend: str, inputs: Inputs, options: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...]]:
        return _op(cell, apart, packed, "step", inputs, options, keep=False)

    def module(_target: Target, case: Case) -> Extension:
        size = _size(cell, case.options, case.sizes["N"], case.sizes["V"], case.dtype)
        return native.extension(cell, "cuda", replace(size, step=True))

    maps, every = cell.maps[0], (*cell.options, *cell.optional)
    return replace(
        whole,
        name=f"{cell.name}_step",
        cases=lambda _target, grid: list(_spread(cell, STEPS, grid)),
        make_inputs=drawn,
        call=call,
        extension=lambda target: native.usual(cell, target, step=True),
        op=op,
        targets=("cuda",),
        module=module,
        builds=lambda target, _arch, rows, dtypes: _builds(cell, target, rows, dtypes, step=True),
        emulated=(
            case((4, 1, 2, 16, 20), torch.bfloat16, maps=maps, fused=not cell.shared, masked=True, packed=True),
            case((1, 1, 1, 52, 6), torch.bfloat16, on=every, wide=_wide(cell)),
        ),
        differentiable=False,
    )


def _op(
    cell: MatrixCell, apart: Operator, packed: Operator, backend: str, inputs: Inputs, options: Mapping[str, Any], **more: Any
) -> tuple[Any, tuple[Any, ...]]:  # fmt: skip
    heads, rows = _sizes(inputs, options)
    constants = {"heads": heads, "rows": rows, "form": _size(cell, options, 0, 0, torch.float32).form}
    return (apart if "q" in inputs else packed).example(backend, inputs, constants | more)


def _sizes(inputs: Inputs, options: Mapping[str, Any]) -> tuple[int, int]:
    """(H, N)."""
    if "q" not in inputs:
        return options["heads"], options["n_state"]
    return max(inputs[n].shape[2] for n in ("q", "k", "v")), inputs["q"].shape[3]


def _size(cell: MatrixCell, options: Mapping[str, Any], rows: int, columns: int, dtype: torch.dtype) -> Size:
    """The module for a case of these options."""
    on = [bool(options.get(n, False)) for n in cell.options]
    given, packed = all(options.get(n, False) for n in cell.optional), bool(options.get("packed"))
    return Size(rows, columns, dtype, cell.form(options.get("maps", Maps()), on, given, packed, options.get("wide", 0)))


def _builds(
    cell: MatrixCell, target: Target, rows: Sequence[int], dtypes: Sequence[torch.dtype], step: bool = False
) -> list[Extension]:
    """The form that a model runs by default, with V = N, for each N (`rows`) and dtype. Raises as `native.extension`."""
    found = []
    for count in rows or cell.rows:
        for dtype in dtypes or ((torch.bfloat16,) if target == "cuda" else (torch.float32,)):
            size = _size(cell, {"maps": cell.maps[0]}, count, count, dtype)
            found.append(native.extension(cell, target, replace(size, step=step)))
    return found


def case(
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    *,
    maps: Maps | None = None,
    fused: bool = False,
    on: Sequence[str] = (),
    **special: Any,
) -> Case:
    """One problem. fused: in the form of that name. on: the options that are on, and the optional scalar if it is given."""
    options: dict[str, Any] = dict.fromkeys(on, True)
    if maps not in (None, Maps()):
        options["maps"] = maps
    if fused:
        options |= {"n_state": sizes[3], "heads": sizes[2]}
    return Case.of("BTHNV", sizes, dtype, **options, **special)


def _ways(cell: MatrixCell) -> list[Way]:
    """Every map, every option and all of them, but not every combination."""
    every = (*cell.options, *cell.optional)
    on: list[tuple[str, ...]] = [(), *((n,) for n in every)]
    ways = [(maps, on[i % len(on)]) for i, maps in enumerate(cell.maps)]
    ways += [(maps, each) for maps in (cell.maps[0], cell.maps[-1]) for each in on]
    return list(dict.fromkeys([*ways, (cell.maps[0], every)]))


def _cases(cell: MatrixCell, target: Target, grid: Grid) -> Iterator[Case]:
    """The problems of a grid, and those of some cells."""
    every, blocks = (*cell.options, *cell.optional), target == "cuda" and cell.delta
    for problems in PROBLEMS[target]:
        yield from _spread(cell, replace(problems, modules=problems.modules - len(_AT_ONCE) * blocks), grid)
    for dtype in (d for d in native.DTYPES[target] if d.itemsize == 2):
        for rows in (32, 64) if cell.vectors else ():
            yield case((2, 50, 2, rows, rows), dtype, maps=cell.maps[0], wide=_wide(cell))
        for i, size in enumerate(_AT_ONCE if blocks and grid == "full" else ()):
            words = {"masked": i > 2, "packed": i % 2 == 1}
            yield case((2, 101, 2, *size), dtype, maps=cell.maps[0], on=every, **words)


def _spread(cell: MatrixCell, problems: Problems, grid: Grid) -> Iterator[Case]:
    """The problems of a grid, in both forms and all ways in turn (on a GPU each kind in one way)."""
    ways, kinds = _ways(cell), dict[Any, int]()
    for i, each in enumerate(problems.cases(grid, cell.name)):
        maps, on = ways[kinds.setdefault(problems.kind(each) if problems.compiled else i, len(kinds)) % len(ways)]
        fused = not cell.shared and (i + i // len(ways)) % 2 == 0
        special = {n: getattr(each, n) for n in ("masked", "strided", "bare")} | dict(each.options)
        yield case(tuple(each.sizes.values()), each.dtype, maps=maps, fused=fused, on=on, **special)


def _wide(cell: MatrixCell) -> int:
    """The first vector and the third, as bits: each float32 beside the other in 16 bits."""
    return 0b101 & (1 << len(cell.vectors)) - 1


def _emulated_cases(cell: MatrixCell) -> tuple[Case, ...]:
    """Everything off, everything on; on lanes and in tensor cores; large heads, or sixteen steps at once; packed rows."""
    every = (*cell.options, *cell.optional)
    fused = not cell.shared
    found = [
        case((2, 20, 3, 16, 16), torch.bfloat16, maps=cell.maps[0], fused=fused, masked=True),
        case((1, 18, 1, 8, 20), torch.bfloat16, on=every, packed=True),
    ]
    if not cell.delta:
        found.append(case((1, 18, 2, 36, 20), torch.bfloat16, maps=cell.maps[0], wide=_wide(cell)))
    if cell.delta:
        words = {"masked": True, "packed": True}
        found.append(case((1, 37, 1, 52, 24), torch.bfloat16, maps=cell.maps[0], fused=fused, on=every, **words))
    return tuple(found)


_AT_ONCE = ((64, 256), (96, 256), (128, 192), (36, 20), (72, 65), (124, 3))  # N, V of kernels of sixteen steps at once
# On the host two states, since each is compiled, and none square, which would hide a transposed one.
_HOST = (
    "2x21x2x8x12, 2x1x1x4x3, 2x5x2x4x3 masked, 2x19x3x8x12, 2x33x2x8x12 masked packed, 1x16x2x4x3 strided, "
    "1x18x2x4x3 bare, 2x17x1x8x12 packed, 2x21x2x4x3 masked"
)
PROBLEMS: dict[Target, tuple[Problems, ...]] = {
    "host": tuple(
        Problems(
            "BTHNV", (dtype,),
            named=named,
            values={
                "B": (1, 2), "T": (1, 15, 16, 17, 50), "H": (2, 3),
                "NV": ((4, 4), (4, 8), (8, 8), (8, 16), (16, 16), (16, 32)),
            },
            count=30,
        )
        for dtype, named in ((torch.float64, _HOST), (torch.float32, "2x1x1x4x3, 2x5x2x4x3 masked"))
    ),
    "cuda": (
        Problems(
            "BTHNV", native.DTYPES["cuda"],
            named=(
                "3x1x2x16x16, 2x35x2x16x16 bare, 2x37x3x32x32, 2x40x2x24x48 strided, 2x50x5x32x32 masked, 2x33x3x16x16, "
                "2x33x2x20x7 masked, 2x50x2x64x64 packed, 2x37x3x64x64 masked packed, 1x2049x4x16x16, 4x512x8x32x32"
            ),
            large="1x64x1024x16x16, 1x16385x2x16x16, 64x128x83x32x32, 2x35x2x8x8 bare, 2x37x3x32x32 masked packed",
            values={
                "B": (1, 2, 3), "T": (1, 31, 33, 47, 101), "H": (2, 3, 4, 5),
                "NV": (
                    *((n, n) for n in (4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 48, 56, 64, 80, 96, 128)),
                    (16, 32), (32, 64), (8, 3), (32, 17), (48, 24), *_AT_ONCE,
                ),
            },
            count=324, compiled="NV",
        ),
    ),
    "cpu": (
        Problems(
            "BTHNV", native.DTYPES["cpu"],
            named=(
                "2x37x3x16x24, 2x50x3x32x32 masked packed, 2x21x2x20x7 strided, 1x18x2x64x80 bare packed, 3x1x2x16x24, "
                "2x34x2x20x7 masked packed"
            ),
            values={"B": (1, 2), "T": (15, 17, 65), "H": (2, 3), "NV": ((4, 3), (8, 8), (24, 48), (64, 64), (128, 256))},
            count=30,
        ),
    ),
}  # fmt: skip
STEPS = Problems(
    "BTHNV", native.DTYPES["cuda"],
    named=(
        "1x1x5x128x256 bare, 64x1x5x128x256, 4x1x2x16x16 masked packed, 250x1x2x16x16 strided, 5x1x3x64x64 masked, "
        "2x1x1x20x7 packed, 300x1x2x12x18 masked packed"
    ),
    values={
        "B": (1, 4, 8, 100), "T": (1,), "H": (1, 3, 5),
        "NV": ((4, 3), (32, 32), (24, 24), (36, 20), (48, 9), (96, 128), (124, 33), (72, 50)),
    },
    count=32, compiled="NV", modules=10,
)  # fmt: skip
"""Of one step: few blocks are narrow, many are wide."""
