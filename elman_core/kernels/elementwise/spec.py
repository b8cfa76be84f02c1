"""The problems on which elementwise kernels are verified. T time, B batch, d width."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from elman_core.kernels import build
from elman_core.kernels.runtime import compute_dtype
from elman_core.kernels.spec import Case, Cell, Grid, Inputs, KernelSpec, Outputs, padding_mask

from . import native

_HOST_DTYPES = (torch.float64, torch.float32)
_CUDA_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_case = partial(Case.of, "TBd")


def make_spec(cell: Cell, kernel: Callable[..., tuple[Tensor, ...]], operator: Any) -> KernelSpec:
    """The spec of an elementwise kernel. The option `packed` of a case: documents start inside its rows.

    Args:
        kernel: the `ElementwiseKernel`. operator: of `torch.library`.
    """
    names = (*cell.streams, *cell.vectors, *cell.states)

    def make_inputs(case: Case, generator: torch.Generator) -> Inputs:
        steps, rows, width = (case.sizes[k] for k in "TBd")
        full = compute_dtype(case.dtype)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        inputs: Inputs = {name: random(steps, rows, width).to(case.dtype) for name in cell.streams}
        # A factor above 1 would make the state or its rounding grow: the comparison would be a matter of luck.
        inputs |= {name: (0.9 * torch.tanh(random(width))).to(full) for name in cell.vectors}
        inputs |= {name: (random(rows, width) * (not case.bare)).to(full) for name in cell.states}
        inputs["mask"] = padding_mask(steps, rows, generator) if case.masked else None
        inputs["starts"] = torch.rand(steps, rows, generator=generator) < 0.15 if case.options else None
        return cell.adjusted(inputs, case)

    def call(backend: str, inputs: Inputs, _options: Mapping[str, Any]) -> Outputs:
        given = (*(inputs[n] for n in names), inputs.get("mask"), inputs.get("starts"))
        y, *last = kernel(*given, backend=backend)
        return {"y": y, **{f"{n}_T": h for n, h in zip(cell.states, last, strict=True)}}

    def op(backend: str, inputs: Inputs, _options: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...]]:
        given = [inputs[n] for n in (*cell.streams, *cell.vectors)]
        h0 = torch.stack([inputs[n] for n in cell.states])
        return operator, (*given, h0, inputs["mask"], inputs["starts"], True, backend)

    return KernelSpec(
        name=cell.name,
        cases=lambda target, grid: list(_host_cases(grid) if target == "host" else _cuda_cases(grid)),
        make_inputs=make_inputs,
        call=call,
        states=tuple(f"{n}_T" for n in cell.states),
        extension=lambda target: native.extension(cell, target),
        op=op,
        targets=build.targets(),
        portable=("torch",),
        emulated=(_case((37, 3, 24), torch.bfloat16, masked=True, packed=True), _case((18, 2, 130), torch.bfloat16)),
        record=cell.header.with_name("errors.json"),
        module=lambda target, case: native.extension(cell, target, case.dtype),
        builds=lambda target, _arch, _widths, dtypes: list(
            dict.fromkeys(native.extension(cell, target, dtype) for dtype in dtypes or (torch.bfloat16,))
        ),
        python=cell.python(__file__),
    )


def _host_cases(grid: Grid) -> Iterator[Case]:
    for dtype in _HOST_DTYPES:
        # float64 shows a fault in a few numbers; in float32 the relative error of a few numbers is a matter of luck.
        wide = 1 if dtype == torch.float64 else 16
        yield _case((1, 2, 4 * wide), dtype)
        yield _case((7, 3, 5 * wide), dtype, masked=True)
        yield _case((9, 4, 12 * wide), dtype, masked=True, strided=True, packed=True)
        yield _case((17, 3, 8 * wide), dtype, packed=True)
        yield _case((33, 2, 96), dtype, strided=True, bare=True)
        if grid == "full":
            for steps in (1, 2, 16, 65):
                for rows, width in ((1, 7 * wide), (3, 64), (33, 32)):
                    yield _case((steps, rows, width), dtype, bare=rows == 33)
                    yield _case((steps, rows, width), dtype, masked=True, strided=rows == 3)
                    yield _case((steps, rows, width), dtype, masked=rows == 1, packed=True)
            yield _case((4096, 1, 8), dtype)


def _cuda_cases(grid: Grid) -> Iterator[Case]:
    for dtype in _CUDA_DTYPES:
        yield _case((1, 1, 512), dtype)
        yield _case((17, 3, 64), dtype, packed=True)
        yield _case((33, 3, 272), dtype, masked=True, strided=True)
        yield _case((64, 32, 1024), dtype)
        yield _case((65, 70, 200), dtype, masked=True, packed=True)
        yield _case((515, 4, 512), dtype, bare=True)
        if grid == "full":
            yield _case((1, 1, 1), dtype, masked=True)
            # Not many rows of one channel: of one sum that nearly cancels, the relative error is a matter of luck.
            for rows, width in ((200, 3), (70, 7)):
                yield _case((1, rows, width), dtype, masked=True)
                yield _case((33, rows, width), dtype, masked=True, packed=True)
            for width in (63, 64, 136, 512, 768, 1024, 1280, 1536, 2048, 4096):
                yield _case((1, 3, width), dtype, masked=True)
                yield _case((31, 3, width), dtype, masked=True, packed=True)
                yield _case((129, 3, width), dtype, strided=True)
                yield _case((48, 32, width), dtype, bare=True)
                yield _case((21, 70, width), dtype, masked=True, strided=True)
            yield _case((512, 32, 1024), dtype)
            yield _case((4096, 8, 256), dtype, packed=True)
