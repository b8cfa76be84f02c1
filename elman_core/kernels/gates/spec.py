"""The problems on which gated kernels are verified. T time, B batch, d width."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from elman_core.kernels import build
from elman_core.kernels.dense.run import check_errors
from elman_core.kernels.runtime import compute_dtype
from elman_core.kernels.spec import Case, Cell, Grid, Inputs, KernelSpec, Outputs, padding_mask

from . import native

_HOST_DTYPES = (torch.float64, torch.float32)
_WIDTHS = (512, 768, 1024)  # for which `elman build` compiles


def make_spec(cell: Cell, kernel: Callable[..., tuple[Tensor, ...]], operator: Any) -> KernelSpec:
    """The spec of a `GatesKernel` and its operator."""
    names = ("u", "w", "b", *cell.states)

    def make_inputs(case: Case, generator: torch.Generator) -> Inputs:
        steps, rows, width = (case.sizes[k] for k in "TBd")
        full = compute_dtype(case.dtype)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        inputs: Inputs = {"u": random(steps, rows, cell.gates * width).to(case.dtype)}
        inputs["w"] = (random(cell.gates * width, width) * (0.45 / width**0.5)).to(case.dtype)
        inputs["b"] = (0.3 * random(cell.gates * width)).to(full)
        inputs |= {name: (0.5 * random(rows, width) * (not case.bare)).to(full) for name in cell.states}
        inputs["mask"] = padding_mask(steps, rows, generator) if case.masked else None
        return cell.adjusted(inputs, case)

    def call(backend: str, inputs: Inputs, _options: Mapping[str, Any]) -> Outputs:
        y, *last = kernel(*(inputs[n] for n in names), mask=inputs["mask"], backend=backend)
        return {"y": y, **{f"{n}_T": h for n, h in zip(cell.states, last, strict=True)}}

    def op(backend: str, inputs: Inputs, _options: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...]]:
        h0 = torch.stack([inputs[n] for n in cell.states])  # type: ignore[misc]
        return operator, (inputs["u"], inputs["w"], inputs["b"], h0, inputs["mask"], None, True, backend)

    def builds(target: build.Target, _arch: str, widths: Any, dtypes: Any) -> list[build.Extension]:
        if target == "host":
            return [native.extension(cell, "host")]
        sizes = [(t, d, rows) for t in dtypes or (torch.bfloat16,) for d in widths or _WIDTHS for rows in (8, 16)]
        return [native.extension(cell, target, *size) for size in sizes]

    return KernelSpec(
        name=cell.name,
        cases=lambda target, grid: list(_host_cases(grid) if target == "host" else _cuda_cases(grid)),
        make_inputs=make_inputs,
        call=call,
        states=tuple(f"{n}_T" for n in cell.states),
        extension=lambda target: native.extension(cell, target),
        op=op,
        targets=build.targets(),
        portable=("torch",) if cell.inner is None else (),
        emulated=tuple(
            Case.of("TBd", size, torch.bfloat16, masked=size[0] == 34) for size in ((34, 3, 64), (3, 11, 64))
        ),
        record=cell.header.with_name("errors.json"),
        builds=builds,
        after=check_errors,
        python=cell.python(__file__),
    )


def _host_cases(grid: Grid) -> Iterator[Case]:
    for dtype in _HOST_DTYPES:
        # float64 shows a fault in a few numbers; in float32 the relative error of a few numbers is a matter of luck.
        wide = 1 if dtype == torch.float64 else 8
        yield Case.of("TBd", (1, 2, 4 * wide), dtype)
        yield Case.of("TBd", (7, 3, 5 * wide), dtype, masked=True)
        yield Case.of("TBd", (8, 2, 6 * wide), dtype, strided=True)
        yield Case.of("TBd", (9, 4, 7 * wide), dtype, masked=True, strided=True)
        yield Case.of("TBd", (33, 2, 24), dtype, bare=True)
        if grid == "full":
            for steps in (1, 2, 50):
                for rows, width in ((1, 3 * wide), (5, 32), (33, 16)):
                    yield Case.of("TBd", (steps, rows, width), dtype, bare=rows == 33)
                    yield Case.of("TBd", (steps, rows, width), dtype, masked=True, strided=rows == 5)
            yield Case.of("TBd", (2048, 1, 8), dtype)


def _cuda_cases(grid: Grid) -> Iterator[Case]:
    for dtype in native.DTYPES:
        yield Case.of("TBd", (1, 3, 64), dtype)
        yield Case.of("TBd", (17, 3, 512), dtype, masked=True)
        yield Case.of("TBd", (33, 32, 768), dtype, masked=True, strided=True)
        yield Case.of("TBd", (64, 32, 1024), dtype)
        yield Case.of("TBd", (65, 70, 256), dtype, strided=True)
        yield Case.of("TBd", (129, 32, 512), dtype, bare=True)
        if grid == "full":
            for width in (64, 128, 320, 512, 640, 768, 896, 1024):
                yield Case.of("TBd", (1, 2, width), dtype)
                yield Case.of("TBd", (31, 3, width), dtype, masked=True)
                yield Case.of("TBd", (40, 32, width), dtype, strided=True)
                yield Case.of("TBd", (21, 70, width), dtype, masked=True, bare=True)
            yield Case.of("TBd", (2048, 8, 256), dtype)
