"""The problems on which matrix-state kernels are verified. B batch, T time, H heads, N rows (keys), V columns (values)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elman_core.kernels import build
from elman_core.kernels.build import Extension
from elman_core.kernels.cell import Cell
from elman_core.kernels.runtime import compute_dtype
from elman_core.kernels.spec import Case, Grid, Inputs, KernelSpec, Outputs, Target, padding_mask
from elman_core.registry.errors import KernelError

from . import modules, portable
from .modules import Maps, Size

Run = Callable[..., tuple[Tensor, Tensor]]
_PLAIN, _FUSED = str(Maps()), str(Maps(True, True, "mamba", "given"))
_USUAL_ROWS = (16, 24, 32)
_GATED = str(Maps(True, True, "mamba", "sigmoid"))


def make_spec(cell: Cell, kernel: Run, fused: Run, operator: Any) -> KernelSpec:
    """What `verify` knows of a matrix-state kernel: its two forms, and the operator behind both."""

    def arguments(inputs: Inputs, options: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        maps = Maps.parse(options.get("maps", _PLAIN))
        linear = {"linear_state": options.get("linear_state", False)}
        if "qkv" not in inputs:
            return tuple(inputs.get(n) for n in ("q", "k", "v", "decay", "write", "S0", "mask")), linear
        named = {
            "n_state": options["n_state"], "silu": maps.silu, "l2_norm": maps.l2, "decay": maps.decay,
            "a_log_H": inputs.get("A_log"), "dt_bias_H": inputs.get("dt_bias"),
        }  # fmt: skip
        return tuple(inputs.get(n) for n in ("qkv", "decay", "write", "S0", "mask")), named | linear

    def call(backend: str, inputs: Inputs, options: Mapping[str, Any]) -> Outputs:
        args, named = arguments(inputs, options)
        run = fused if "qkv" in inputs else kernel
        if backend == "stored":
            if "qkv" in inputs:
                return stored(args, named, options["maps"])
            backend = "reference"
        o, state = run(*args, backend=backend, **named)
        return {"o": o, "S": state}

    def stored(args: tuple[Any, ...], named: dict[str, Any], maps: str) -> Outputs:
        """The fused reference with q, k and v rounded to the storage dtype, as a recurrence gets them that stands alone."""

        def rounded(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
            return cell.reference(*(x.to(args[0].dtype).to(x.dtype) for x in (q, k, v)), *rest, **options)

        same = {n: named[n] for n in ("n_state", "a_log_H", "dt_bias_H", "linear_state")}
        o, state = portable.fused_reference(rounded, *args, maps=Maps.parse(maps), **same)
        return {"o": o, "S": state}

    def op(backend: str, inputs: Inputs, options: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...]]:
        maps, linear = options.get("maps", _PLAIN), options.get("linear_state", False)
        if "qkv" in inputs:
            tensors = [
                inputs[n] if n else None for n in ("qkv", "", "", "decay", "write", "S0", "mask", "A_log", "dt_bias")
            ]
            rows = options["n_state"]
        else:
            tensors = [inputs[n] if n else None for n in ("q", "k", "v", "decay", "write", "S0", "mask", "", "")]
            found = inputs["q"]
            assert found is not None
            rows = found.shape[3]
        return operator, (*tensors, rows, linear, maps, True, backend)

    def visible(inputs: Inputs) -> Outputs:
        mask = inputs["mask"]
        return {} if mask is None else {"o": mask[..., None, None]}

    def cases(target: Target, grid: Grid) -> list[Case]:
        return list(_host_cases(grid) if target == "host" else _cuda_cases(grid))

    return KernelSpec(
        name=cell.name,
        cases=cases,
        make_inputs=make_inputs,
        call=call,
        states=("S",),
        extension=lambda target: modules.usual(cell, target),
        op=op,
        targets=build.targets(),
        needs=lambda target, cases: _needs(cell, target, cases),
        builds=lambda target, _arch, rows, dtypes: _builds(cell, target, rows, dtypes),
        visible=visible,
        rounded="stored",
        record=cell.header.with_name("errors.json"),
        python=cell.python(*map(str, sorted(Path(__file__).parent.glob("*.py")))),
    )


def _needs(cell: Cell, target: Target, cases: Sequence[Case]) -> list[Extension]:
    """A module for each size, dtype and form among the cases."""
    found = []
    for each in cases:
        size = Size(
            each.sizes["N"], each.sizes["V"], each.dtype, each.options.get("linear_state", False),
            each.options.get("write", False), each.options.get("maps", _PLAIN),
        )  # fmt: skip
        with contextlib.suppress(KernelError):  # the case itself reports what is not supported
            modules.check(cell.name, target, size)
            found.append(modules.extension(cell, target, size))
    return found


def _builds(cell: Cell, target: Target, rows: Sequence[int], dtypes: Sequence[torch.dtype]) -> list[Extension]:
    """The form that a model runs by default, V = N, for each N (`rows`) and dtype.

    Raises:
        KernelError: an N or dtype that is not supported; names what is.
    """
    found = []
    for count in rows or _USUAL_ROWS:
        for dtype in dtypes or ((torch.float32,) if target == "host" else (torch.bfloat16,)):
            size = Size(count, count, dtype, False, False, _FUSED)
            modules.check(cell.name, target, size)
            found.append(modules.extension(cell, target, size))
    return found


def first_use_case(size: Size) -> Case:
    """By which a size is verified when it is first trained."""
    plain = size.maps == _PLAIN or (size.write and size.maps == _PLAIN)
    return case(
        (2, 49, 3, size.rows, size.columns),
        size.dtype,
        linear=size.linear,
        write=size.write,
        maps=None if plain else size.maps,
    )


def case(
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    *,
    linear: bool = False,
    write: bool = False,
    maps: str | None = None,
    **special: Any,
) -> Case:
    """One problem. maps: as the string of `Maps`, for the fused form."""
    options: dict[str, Any] = {}
    if linear:
        options["linear_state"] = True
    if write:
        options["write"] = True
    if maps is not None:
        options["maps"], options["n_state"] = maps, sizes[3]
    return Case(dict(zip("BTHNV", sizes, strict=True)), dtype, options=options, **special)


def make_inputs(case: Case, generator: torch.Generator) -> Inputs:
    """Keys and queries of length about 1, decays from 0.5 to 1: the state neither dies nor explodes."""
    B, T, H, N, V = (case.sizes[k] for k in "BTHNV")
    wide = compute_dtype(case.dtype)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def unit(*shape: int) -> Tensor:
        return torch.nn.functional.normalize(normal(*shape), dim=-1)

    rest: Inputs = {"mask": padding_mask(T, B, generator).t().contiguous() if case.masked else None}
    rest["S0"] = None if case.bare else (0.4 * normal(B, H, N, V)).to(wide)
    write = case.options.get("write", False)
    if "maps" not in case.options:
        inputs: Inputs = {"q": unit(B, T, H, N).to(case.dtype), "k": unit(B, T, H, N).to(case.dtype)}
        inputs["v"] = normal(B, T, H, V).to(case.dtype)
        inputs["decay"] = (1 - 0.5 * torch.rand((B, T, H), generator=generator) ** 2).to(wide)
        inputs["write"] = torch.rand((B, T, H), generator=generator).to(wide) if write else None
        return inputs | rest
    maps = Maps.parse(case.options["maps"])
    scale = 1.0 if maps.l2 else N**-0.5
    inputs = {"qkv": torch.cat([scale * normal(B, T, 2 * H * N), normal(B, T, H * V)], -1).to(case.dtype)}
    raw = maps.decay != "given"
    decay = normal(B, T, H) if raw else 1 - 0.5 * torch.rand((B, T, H), generator=generator) ** 2
    inputs["decay"] = decay.to(case.dtype if raw else wide)
    inputs["write"] = normal(B, T, H).to(case.dtype) if write else None
    mamba = maps.decay == "mamba"
    inputs["A_log"] = (0.5 * normal(H)).to(wide) if mamba else None
    inputs["dt_bias"] = (normal(H) - 2).to(wide) if mamba else None
    return inputs | rest


def _host_cases(grid: Grid) -> Iterator[Case]:
    for dtype in modules.HOST_DTYPES:
        yield case((2, 1, 1, 4, 4), dtype)
        yield case((2, 5, 2, 4, 3), dtype, write=True, masked=True)
        yield case((2, 19, 3, 8, 8), dtype)
        yield case((2, 33, 2, 8, 12), dtype, write=True, masked=True)
        yield case((1, 16, 2, 4, 3), dtype, linear=True, strided=True)
        yield case((2, 21, 2, 12, 8), dtype, maps=_FUSED)
        yield case((2, 21, 2, 8, 8), dtype, maps=_GATED, write=True, masked=True)
        yield case((1, 18, 2, 4, 8), dtype, maps=str(Maps(False, True, "sigmoid", "given")), bare=True)
        yield case((2, 17, 1, 4, 4), dtype, maps=str(Maps(True, False, "given", "given")), linear=True)
        if grid == "full":
            for rows in (4, 8, 16):
                for steps in (1, 15, 16, 17, 50):
                    yield case((2, steps, 2, rows, rows), dtype)
                    yield case((1, steps, 3, rows, 2 * rows), dtype, maps=_GATED, write=True, masked=True)


def _cuda_cases(grid: Grid) -> Iterator[Case]:
    for dtype in modules.CUDA_DTYPES:
        yield case((2, 33, 3, 16, 16), dtype)
        yield case((3, 1, 2, 16, 16), dtype)
        yield case((2, 50, 5, 32, 32), dtype, masked=True)
        yield case((2, 37, 3, 32, 32), dtype, write=True, maps=_GATED)
        yield case((2, 40, 2, 24, 48), dtype, write=True, strided=True)
        yield case((2, 35, 2, 8, 8), dtype, linear=True, bare=True)
        yield case((1, 33, 2, 64, 64), dtype, maps=_FUSED)
    yield case((1, 2049, 4, 16, 16), torch.bfloat16, maps=_FUSED)
    yield case((2, 33, 2, 20, 7), torch.bfloat16, masked=True)
    yield case((4, 512, 8, 32, 32), torch.bfloat16)
    if grid == "full":
        for dtype in modules.CUDA_DTYPES:
            for rows in (4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 48, 56, 64, 80, 96, 128):
                yield case((2, 33, 3, rows, rows), dtype)
                yield case((1, 1, 2, rows, rows), dtype)
                yield case((1, 47, 2, rows, rows), dtype, masked=True)
            for rows, columns in ((16, 32), (32, 64), (8, 3), (32, 17), (48, 24)):
                yield case((2, 33, 2, rows, columns), dtype)
            for rows in (8, 16, 32, 64, 128):
                yield case((2, 31, 2, rows, rows), dtype, maps=_GATED, write=True, masked=True)
                yield case((2, 31, 2, rows, rows), dtype, maps=_FUSED, linear=True)
                yield case((2, 31, 2, rows, rows), dtype, maps=str(Maps(False, True, "sigmoid", "given")), strided=True)
                yield case((2, 31, 2, rows, rows), dtype, maps=str(Maps(True, False, "given", "given")))
            yield case((1, 64, 1024, 16, 16), dtype)
        yield case((1, 65536, 2, 16, 16), torch.bfloat16)
        yield case((64, 128, 83, 32, 32), torch.bfloat16)
