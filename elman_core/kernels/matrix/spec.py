"""The problems on which matrix-state kernels are verified. B batch, T time, H heads, N rows (keys), V columns (values)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from elman_core.kernels import build
from elman_core.kernels.build import Extension
from elman_core.kernels.runtime import compute_dtype
from elman_core.kernels.spec import Case, Grid, Inputs, KernelSpec, Outputs, Target, padding_mask

from . import modules
from .modules import Maps, MatrixCell, Size

Run = Callable[..., tuple[Tensor, Tensor]]
Way = tuple[
    Maps, bool, tuple[str, ...]
]  # of a call: maps, whether packed, options that are on and scalars that are given


def make_spec(cell: MatrixCell, kernel: Run, fused: Run, operator: Any) -> KernelSpec:
    """The spec of a matrix-state kernel: its two forms, and the operator behind both."""

    def first(inputs: Inputs, options: Mapping[str, Any]) -> tuple[Tensor, int, int]:
        """q or the packed inputs, H, and N."""
        if "packed" in inputs:
            return inputs["packed"], options["heads"], options["n_state"]
        return inputs["q"], max(inputs[n].shape[2] for n in ("q", "k", "v")), inputs["q"].shape[3]

    def arguments(inputs: Inputs, options: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        names = cell.names if "packed" not in inputs else cell.names[len(cell.packed) :]
        keys = ("packed",) if "packed" in inputs else ("q", "k")
        named: dict[str, Any] = {n: options[n] for n in ("n_state", "heads", *cell.options) if n in options}
        heads = {"state_BHNV": "S0", "mask_BT": "mask", "a_log_H": "A_log", "dt_bias_H": "dt_bias"}
        named |= {to: inputs.get(n) for to, n in heads.items()} | {"maps": options.get("maps", Maps())}
        return [inputs.get(n) for n in (*keys, *names)], named

    def call(backend: str, inputs: Inputs, options: Mapping[str, Any]) -> Outputs:
        args, named = arguments(inputs, options)
        if backend == "stored":
            o, state = stored(inputs, options)
        else:
            o, state = (fused if "packed" in inputs else kernel)(*args, backend=backend, **named)
        return {"o": o, "S": state}

    def stored(inputs: Inputs, options: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """The reference with all inputs but the scalars rounded to the storage dtype, as separate ops would hand them over."""
        like, *sizes = first(inputs, options)

        def rounded(*given: Any, **more: Any) -> tuple[Tensor, Tensor]:
            count = len(cell.vectors) if options.get("wide") else 0
            inputs = enumerate(given[: 2 + len(cell.packed)])
            keys = (x if 2 <= i < 2 + count else x.to(like.dtype).to(x.dtype) for i, x in inputs)
            return cell.reference(*keys, *given[2 + len(cell.packed) :], **more)

        tensors = {"q": like} | {n: inputs.get(n) for n in ("k", *cell.names)}
        rest = tuple(inputs.get(n) for n in ("S0", "mask", "starts", "A_log", "dt_bias"))
        on = {n: options.get(n, False) for n in cell.options}
        return modules.recurrence(rounded, cell, options.get("maps", Maps()), tensors, sizes, rest, on)

    def op(backend: str, inputs: Inputs, options: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...]] | None:
        if options.get("wide"):  # a call widens the others first
            return None
        names = ("k", *cell.names, "S0", "mask", "A_log", "dt_bias")
        size = _size(cell, options, 0, 0, torch.float32)
        like, heads, rows = first(inputs, options)
        return operator, (like, *(inputs.get(n) for n in names), heads, rows, size.form, True, backend)

    return KernelSpec(
        name=cell.name,
        cases=lambda target, grid: list((_host_cases if target == "host" else _cuda_cases)(cell, grid)),
        make_inputs=lambda case, generator: make_inputs(cell, case, generator),
        call=call,
        states=("S",),
        extension=lambda target: modules.usual(cell, target),
        op=op,
        targets=build.targets(),
        module=lambda target, c: modules.extension(
            cell,
            target,
            _size(cell, c.options, c.sizes["N"], c.sizes["V"], torch.float32 if "wide" in c.options else c.dtype),
        ),
        builds=lambda target, _arch, rows, dtypes: _builds(cell, target, rows, dtypes),
        visible=lambda inputs: {"o": mask[..., None, None]} if (mask := inputs["mask"]) is not None else {},
        emulated=_emulated_cases(cell),
        rounded="stored",
        record=cell.header.with_name("errors.json"),
        python=cell.python(__file__),
    )


def _size(cell: MatrixCell, options: Mapping[str, Any], rows: int, columns: int, dtype: torch.dtype) -> Size:
    """The module for a case of these options."""
    on = [bool(options.get(n, False)) for n in cell.options]
    given = all(options.get(n, False) for n in cell.optional)
    return Size(rows, columns, dtype, cell.form(options.get("maps", Maps()), on, given))


def _builds(cell: MatrixCell, target: Target, rows: Sequence[int], dtypes: Sequence[torch.dtype]) -> list[Extension]:
    """The form that a model runs by default, with V = N, for each N (`rows`) and dtype. Raises as `modules.extension`."""
    found = []
    for count in rows or cell.rows:
        for dtype in dtypes or ((torch.float32,) if target == "host" else (torch.bfloat16,)):
            size = _size(cell, {"maps": cell.maps[0]}, count, count, dtype)
            found.append(modules.extension(cell, target, size))
    return found


def case(
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    *,
    maps: Maps | None = None,
    packed: bool = False,
    on: Sequence[str] = (),
    **special: Any,
) -> Case:
    """One problem. packed: uses the fused form. on: the options that are on, and the optional scalar if it is given."""
    options: dict[str, Any] = dict.fromkeys(on, True)
    if maps not in (None, Maps()):
        options["maps"] = maps
    if packed:
        options |= {"n_state": sizes[3], "heads": sizes[2]}
    return Case.of("BTHNV", sizes, dtype, **options, **special)


def make_inputs(cell: MatrixCell, case: Case, generator: torch.Generator) -> Inputs:
    """Keys of length about 1, decays and params from 0.5 to 1, so that the state neither dies nor explodes.

    Everything is drawn in the dtype in which layers hand it over. Of vectors that is the storage's, or float32 with the option
    `wide`: then they are the same at all times and from 0.98 to 1, where rounding to 16 bits would show.
    """
    maps, (B, T, H, N, V) = case.options.get("maps", Maps()), (case.sizes[k] for k in "BTHNV")
    wide = compute_dtype(case.dtype)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def share(*shape: int) -> Tensor:
        return 1 - 0.5 * torch.rand(shape, generator=generator) ** 2

    made: Inputs = {}
    for name in ("q", "k"):
        drawn = normal(B, T, 1 if name in cell.shared else H, N)
        made[name] = (drawn if name in maps.normalised else torch.nn.functional.normalize(drawn, dim=-1)).to(case.dtype)
    if case.options.get("wide"):
        near = {name: 1 - 0.02 * torch.rand(B, 1, H, N, generator=generator) for name in cell.vectors}
        made |= {name: x.expand(B, T, H, N).to(wide) for name, x in near.items()}
    else:
        made |= {name: share(B, T, H, N).to(case.dtype) for name in cell.vectors}
    made |= {name: normal(B, T, 1 if name in cell.shared else H, V).to(case.dtype) for name in cell.lines}
    rows = tuple(made)
    for i, name in enumerate(cell.scalars):
        if name in cell.optional and not case.options.get(name, False):
            made[name] = None
        elif maps.kind(i) == "given":
            made[name] = share(B, T, H).to(wide)
        else:
            made[name] = normal(B, T, H).to(case.dtype)
    made |= {name: share(H, V).to(wide) for name in cell.params}
    made["mask"] = padding_mask(T, B, generator).t().contiguous() if case.masked else None
    made["S0"] = None if case.bare else (0.4 * normal(B, H, N, V)).to(wide)
    made["A_log"] = (0.5 * normal(H)).to(wide) if maps.mamba else None
    made["dt_bias"] = (normal(H) - 2).to(wide) if maps.mamba else None
    cell.adjusted(made, case)
    if "n_state" in case.options:
        made = {"packed": torch.cat([made.pop(n).flatten(2) for n in rows], -1)} | made
    return made


def _ways(cell: MatrixCell) -> list[Way]:
    """Every map, both forms and every option, but not every combination."""
    packed = not cell.shared
    on: list[tuple[str, ...]] = [(), *((n,) for n in (*cell.options, *cell.optional))]
    ways = [(maps, packed and i % 2 == 0, on[i % len(on)]) for i, maps in enumerate(cell.maps)]
    ways += [(cell.maps[0], packed, each) for each in on] + [(cell.maps[-1], False, each) for each in on]
    return list(dict.fromkeys(ways))


def _spread(cell: MatrixCell, dtype: torch.dtype, sizes: Sequence[tuple[tuple[int, ...], str]]) -> Iterator[Case]:
    """A case for each (size, special), going through the ways in turn."""
    ways = _ways(cell)
    for i, (each, special) in enumerate(sizes):
        maps, packed, on = ways[i % len(ways)]
        yield case(each, dtype, maps=maps, packed=packed, on=on, **{special: True} if special else {})


def _host_cases(cell: MatrixCell, grid: Grid) -> Iterator[Case]:
    sizes = [  # few states, since each is compiled, and none square, which would hide a transposed one
        ((2, 21, 2, 12, 8), ""), ((2, 1, 1, 4, 3), ""), ((2, 5, 2, 4, 3), "masked"), ((2, 19, 3, 8, 12), ""),
        ((2, 33, 2, 8, 12), "masked"), ((1, 16, 2, 4, 3), "strided"), ((1, 18, 2, 12, 8), "bare"), ((2, 17, 1, 8, 12), ""),
        ((2, 21, 2, 12, 8), "masked"),
    ]  # fmt: skip
    single = sizes[:3]
    if grid == "full":
        for rows in (4, 8, 16):
            for steps in (1, 15, 16, 17, 50):
                sizes += [((2, steps, 2, rows, rows), ""), ((1, steps, 3, rows, 2 * rows), "masked")]
        single = sizes
    yield from _spread(cell, torch.float64, sizes)
    yield from _spread(cell, torch.float32, single)


def _emulated_cases(cell: MatrixCell) -> tuple[Case, ...]:
    """Everything off, everything on, and sixteen steps at once; on lanes and in tensor cores."""
    every = (*cell.options, *cell.optional)
    packed = not cell.shared
    found = [
        case((2, 20, 3, 16, 16), torch.bfloat16, maps=cell.maps[0], packed=packed, masked=True),
        case((1, 18, 1, 8, 20), torch.bfloat16, on=every),
    ]
    if cell.delta:
        found.append(case((1, 37, 1, 52, 24), torch.bfloat16, maps=cell.maps[0], packed=packed, on=every, masked=True))
    return tuple(found)


def _cuda_cases(cell: MatrixCell, grid: Grid) -> Iterator[Case]:
    sizes = [
        ((1, 33, 2, 64, 64), ""), ((3, 1, 2, 16, 16), ""), ((2, 35, 2, 8, 8), "bare"), ((2, 37, 3, 32, 32), ""),
        ((2, 40, 2, 24, 48), "strided"), ((2, 50, 5, 32, 32), "masked"), ((2, 33, 3, 16, 16), ""),
        ((2, 33, 2, 20, 7), "masked"),
    ]  # fmt: skip
    for dtype in modules.CUDA_DTYPES:
        yield from _spread(cell, dtype, sizes)
        if cell.vectors and dtype != torch.float32:
            yield case((2, 50, 2, 32, 32), dtype, maps=cell.maps[0], wide=True)
    yield from _spread(cell, torch.bfloat16, [((1, 2049, 4, 16, 16), ""), ((4, 512, 8, 32, 32), "")])
    if grid != "full":
        return
    for dtype in modules.CUDA_DTYPES:
        for rows in (4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 48, 56, 64, 80, 96, 128):
            yield case((2, 33, 3, rows, rows), dtype, maps=cell.maps[-1])
            yield case((3, 1, 4, rows, rows), dtype, maps=cell.maps[-1])
            yield case((1, 47, 2, rows, rows), dtype, maps=cell.maps[-1], masked=True)
        shapes = ((16, 32), (32, 64), (8, 3), (32, 17), (48, 24))
        yield from _spread(cell, dtype, [((2, 33, 2, *each), "") for each in shapes])
        at_once = ((64, 256), (96, 256), (128, 192), (36, 20), (72, 65), (124, 3)) if cell.delta else ()  # 16 steps
        for i, each in enumerate(at_once):
            yield case((2, 101, 2, *each), dtype, maps=cell.maps[0], on=(*cell.options, *cell.optional), masked=i > 2)
        for rows in (8, 16, 32, 64, 128):
            for i, (maps, packed, on) in enumerate(_ways(cell)):
                special = {("masked", "strided")[i // 2]: True} if i in (0, 2) else {}
                yield case((2, 31, 5, rows, rows), dtype, maps=maps, packed=packed, on=on, **special)
        yield from _spread(cell, dtype, [((1, 64, 1024, 16, 16), "")])
    yield from _spread(cell, torch.bfloat16, [((1, 16385, 2, 16, 16), ""), ((64, 128, 83, 32, 32), "")])
