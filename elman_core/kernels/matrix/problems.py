"""How matrix-state kernels are called and compared. B batch, T time, H heads, N rows (keys), V columns (values)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from elman_core.kernels import build
from elman_core.kernels.build import Extension
from elman_core.kernels.operators import Operator
from elman_core.kernels.spec import Case, Inputs, KernelSpec, Outputs, Target

from . import native, portable
from .spec import Maps, MatrixCell, Size

Run = Callable[..., tuple[Tensor, Tensor]]
_WORDS = {"state_BHNV": "S0", "mask_BT": "mask", "starts_BT": "starts", "a_log_H": "A_log", "dt_bias_H": "dt_bias"}


def make_spec(cell: MatrixCell, kernel: Run, fused: Run, apart: Operator, packed: Operator) -> KernelSpec:
    """The spec of a matrix-state kernel: its two forms, and their operators."""

    def call(backend: str, inputs: Inputs, options: Mapping[str, Any]) -> Outputs:
        if backend == "stored":
            o, state = stored(inputs, options)
            return {"o": o, "S": state}
        run, names = kernel, ("q", "k", *cell.names)
        if "packed" in inputs:
            run, names = fused, ("packed", *cell.names[len(cell.packed) :])
        named = {n: options[n] for n in ("n_state", "heads", *cell.options) if n in options}
        named |= {word: inputs.get(n) for word, n in _WORDS.items()}
        named["maps"] = options.get("maps", Maps())
        o, state = run(*(inputs.get(n) for n in names), backend=backend, **named)
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
        return native.extension(cell, target, _size(cell, case))

    return apart.spec(
        kernel,
        ("o", "S"),
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
        return native.extension(cell, "cuda", replace(_size(cell, case), step=True))

    maps, every = cell.maps[0], (*cell.options, *cell.optional)
    return replace(
        whole,
        name=f"{cell.name}_step",
        family="matrix_step",
        make_inputs=drawn,
        call=call,
        extension=lambda target: native.usual(cell, target, step=True),
        op=op,
        targets=("cuda",),
        module=module,
        builds=lambda target, _arch, rows, dtypes: _builds(cell, target, rows, dtypes, step=True),
        emulated=(
            case((4, 1, 2, 16, 20), torch.bfloat16, maps=maps, fused=not cell.shared, masked=True, packed=True),
            case((1, 1, 1, 52, 6), torch.bfloat16, on=every, wide=every_wide(cell)),
        ),
        differentiable=False,
    )


def _op(
    cell: MatrixCell, apart: Operator, packed: Operator, backend: str, inputs: Inputs, options: Mapping[str, Any], **more: Any
) -> tuple[Any, tuple[Any, ...]]:  # fmt: skip
    heads, rows = _sizes(inputs, options)
    constants = {"heads": heads, "rows": rows, "form": _form(cell, options)}
    return (apart if "q" in inputs else packed).example(backend, inputs, constants | more)


def _sizes(inputs: Inputs, options: Mapping[str, Any]) -> tuple[int, int]:
    """(H, N)."""
    if "q" not in inputs:
        return options["heads"], options["n_state"]
    return max(inputs[n].shape[2] for n in ("q", "k", "v")), inputs["q"].shape[3]


def _size(cell: MatrixCell, case: Case) -> Size:
    return Size(case.sizes["N"], case.sizes["V"], case.dtype, _form(cell, case.options))


def _form(cell: MatrixCell, options: Mapping[str, Any]) -> str:
    on = [bool(options.get(name)) for name in cell.options]
    given = all(options.get(name) for name in cell.optional)
    return cell.form(options.get("maps", Maps()), on, given, bool(options.get("packed")), options.get("wide", 0))


def _builds(
    cell: MatrixCell, target: Target, rows: Sequence[int], dtypes: Sequence[torch.dtype], step: bool = False
) -> list[Extension]:
    """The form that a model runs by default, with V = N, for each N (`rows`) and dtype. Raises as `native.extension`."""
    found = []
    for count in rows or cell.rows:
        for dtype in dtypes or ((torch.bfloat16,) if target == "cuda" else (torch.float32,)):
            size = Size(count, count, dtype, _form(cell, {"maps": cell.maps[0]}), step)
            found.append(native.extension(cell, target, size))
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


def every_wide(cell: MatrixCell) -> int:
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
    if cell.delta:
        words = {"masked": True, "packed": True}
        found.append(case((1, 37, 1, 52, 24), torch.bfloat16, maps=cell.maps[0], fused=fused, on=every, **words))
    else:
        found.append(case((1, 18, 2, 36, 20), torch.bfloat16, maps=cell.maps[0], wide=every_wide(cell)))
    return tuple(found)
