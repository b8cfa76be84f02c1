"""The problems on which dense kernels are verified. T time, B batch, d width."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from elman_core.kernels import build
from elman_core.kernels.build import Extension
from elman_core.kernels.runtime import compute_dtype
from elman_core.kernels.spec import Case, Cell, Grid, Inputs, KernelSpec, Outputs, Target, padding_mask
from elman_core.registry.errors import KernelError

from . import plan, run
from .plan import Device

_USUAL_WIDTHS = (512, 768, 1024, 1280, 1536, 2048)
_USUAL_SLOTS = 8
_USUAL_BATCHES = (1, 8, 16, 32, 64, 128, 256, 512)
# The largest GPU of each architecture: multiprocessors, the most shared memory of a block, compute capability.
_GPUS = {
    "sm_80": Device(108, 163 * 1024, (8, 0)),
    "sm_86": Device(84, 99 * 1024, (8, 6)),
    "sm_89": Device(142, 99 * 1024, (8, 9)),
    "sm_90": Device(132, 227 * 1024, (9, 0)),
    "sm_100": Device(148, 227 * 1024, (10, 0)),
    "sm_120": Device(188, 99 * 1024, (12, 0)),
}
_HOST_DTYPES = (torch.float64, torch.float32)
_case, _blocks = partial(Case.of, "TBd"), partial(Case.of, "TBdS")
CUDA_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def make_spec(cell: Cell, kernel: Callable[..., tuple[Tensor, Tensor]], operator: Any) -> KernelSpec:
    """The spec of a `DenseKernel` and its operator; with tied weights, x and b replace u."""
    tied = cell.bare is not None
    names = ("x" if tied else "u", *cell.extras, "w", *(("b",) if tied else ()), "h0")

    def make_inputs(case: Case, generator: torch.Generator) -> Inputs:
        steps, rows, width = (case.sizes[k] for k in "TBd")
        blocks = (case.sizes["S"],) if cell.blocks else ()
        square = width // math.prod(blocks)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float32).to(case.dtype)

        inputs: Inputs = {name: random(steps, rows, width) for name in (names[0], *cell.extras)}
        if cell.accumulates is not None:
            inputs[cell.accumulates] = (random(steps, rows, width) - math.log(steps)).to(case.dtype)
        # The largest singular value of a random (d, d) matrix is about 2 sqrt(d): W has norm 0.9 or less.
        inputs["w"] = random(*blocks, square, square) * (0.45 / square**0.5)
        h0 = torch.zeros(rows, width) if case.bare else torch.randn((rows, width), generator=generator)
        inputs["h0"] = h0.to(compute_dtype(case.dtype))
        inputs["mask"] = padding_mask(steps, rows, generator) if case.masked else None
        if tied:
            inputs["b"] = torch.randn(width, generator=generator).to(compute_dtype(case.dtype))
        return cell.adjusted(inputs, case)

    def call(backend: str, inputs: Inputs, _options: Mapping[str, Any]) -> Outputs:
        first, *rest = (inputs[n] for n in (names[0], *cell.extras, "w", "h0", "mask"))
        more: dict[str, Any] = {"v": inputs["w"], "b": inputs["b"], "silu": True} if tied else {}
        if tied and backend == "reference":
            wide = compute_dtype(first)
            x, w, b = (inputs[n].to(wide) for n in ("x", "w", "b"))
            first, more = F.linear(F.silu(x), w, b).to(first.dtype), {}
        y, last = kernel(first, *rest, backend=backend, **more)
        return {"y": y, "h_T": last}

    def op(backend: str, inputs: Inputs, _options: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...]] | None:
        if tied and backend != "cuda":
            return None
        return operator, (*(inputs[n] for n in names), inputs["mask"], None, backend)

    def cases(target: Target, grid: Grid) -> list[Case]:
        if cell.blocks:
            return list(_block_cases(target, grid))
        return list(_host_cases(grid) if target == "host" else _cuda_cases(grid))

    return KernelSpec(
        name=cell.name,
        cases=cases,
        make_inputs=make_inputs,
        call=call,
        states=("h_T",),
        extension=lambda target: run.source(cell, target),
        op=op,
        targets=tuple(t for t in build.targets() if t == "cuda" or not tied),
        portable=("torch",),
        emulated=_emulated_cases(cell),
        record=cell.header.with_name("errors.json"),
        module=lambda target, case: _module(cell, target, case),
        builds=lambda target, arch, widths, dtypes: builds(cell, target, arch, widths, dtypes),
        visible=lambda inputs: {"y": mask[..., None]} if (mask := inputs["mask"]) is not None else {},
        after=run.check_errors,
        python=(*cell.python(__file__), *_steps_sources(cell)),
    )


def _steps_sources(cell: Cell) -> tuple[Path, ...]:
    """The sources of the per-step fallback on a GPU, beside those of the persistent launch."""
    if not build.targets():
        return ()
    bare = run.source(cell, "cuda")
    return tuple(replace(bare, binding=bare.binding.with_name("dense_cuda_steps.cu")).sources())


def _module(cell: Cell, target: Target, case: Case) -> Extension:
    if target == "host":
        return run.source(cell, "host")
    steps, rows, width = (case.sizes[k] for k in "TBd")
    device = run._device(torch.cuda.current_device() if torch.cuda.is_available() else None)
    chosen = plan.plan((steps, rows, width), case.dtype, device, slots=case.sizes.get("S", 1))
    return run.extension(cell, chosen, case.dtype, width)


def builds(
    cell: Cell, target: Target, arch: str, widths: Sequence[int], dtypes: Sequence[torch.dtype], slots: int = 0
) -> list[Extension]:
    """A module for each width, dtype and kind of launch that a usual batch takes on a GPU of this architecture."""
    if target == "host":
        return [run.source(cell, "host")]
    if arch not in _GPUS:
        raise KernelError(f"{arch!r} is not an architecture dense kernels are built for: {', '.join(_GPUS)}")
    found: dict[Extension, None] = {}
    slots = slots or (_USUAL_SLOTS if cell.blocks else 1)
    for width in widths or ((512 * slots,) if cell.blocks else _USUAL_WIDTHS):
        for dtype in dtypes or (torch.bfloat16,):
            for batch in _USUAL_BATCHES:
                chosen = plan.plan((1, batch, width), dtype, _GPUS[arch], slots=slots)
                if chosen.kind != "steps" or cell.bare is None:
                    found[run.extension(cell, chosen, dtype, width)] = None
    return list(found)


def _emulated_cases(cell: Cell) -> tuple[Case, ...]:
    """Two blocks that exchange the state in a cluster, with and without a mask."""
    if cell.blocks:
        return (_blocks((5, 3, 128, 2), torch.bfloat16, masked=True),)
    return (_case((35, 3, 128), torch.bfloat16, masked=True), _case((9, 11, 128), torch.bfloat16))


def _block_cases(target: Target, grid: Grid) -> Iterator[Case]:
    for dtype in _HOST_DTYPES if target == "host" else CUDA_DTYPES:
        wide = 5 if target == "host" else 64
        yield _blocks((1, 3, 2 * wide, 2), dtype)
        yield _blocks((7, 3, 3 * wide, 3), dtype)
        yield _blocks((9, 4, 2 * wide, 2), dtype, masked=True)
        yield _blocks((8, 2, 4 * wide, 4), dtype, masked=True, strided=True)
        yield _blocks((33, 2, 2 * wide, 2), dtype, strided=True, bare=True)
        if grid == "full":
            for slots, width in ((2, 6), (8, 4)) if target == "host" else ((8, 512), (4, 768), (2, 1024), (8, 256)):
                yield _blocks((1, 2, slots * width, slots), dtype)
                yield _blocks((40, 32, slots * width, slots), dtype, masked=True)
                yield _blocks((21, 70, slots * width, slots), dtype, strided=True)


def _host_cases(grid: Grid) -> Iterator[Case]:
    for dtype in _HOST_DTYPES:
        yield _case((1, 2, 4), dtype)
        yield _case((1, 3, 16), dtype)
        yield _case((7, 3, 5), dtype)
        yield _case((7, 3, 5), dtype, masked=True)
        yield _case((8, 2, 16), dtype, strided=True)
        yield _case((9, 4, 12), dtype, masked=True, strided=True)
        yield _case((5, 70, 8), dtype)
        yield _case((6, 2, 64), dtype, bare=True)
        yield _case((33, 2, 96), dtype)
        yield _case((1001, 1, 8), dtype)
        if grid == "full":
            # Odd and tiny widths test indices, which float64 shows exactly; in float32 the relative error of a dW of nine
            # elements is a matter of luck.
            widths = (3, 7, 32) if dtype == torch.float64 else (16, 32, 64)
            for steps in (1, 2, 13, 50):
                for rows in (1, 5, 33):
                    for width in widths:
                        yield _case((steps, rows, width), dtype, bare=rows == 33)
                        yield _case((steps, rows, width), dtype, masked=True, strided=rows == 5)
            for width in (48, 128, 200):
                for special in ("masked", "strided", "bare"):
                    yield _case((21, 3, width), dtype, **{special: True})
            yield _case((5, 4, 1), dtype)
            yield _case((16384, 1, 8), dtype)


def _cuda_cases(grid: Grid) -> Iterator[Case]:
    for dtype in CUDA_DTYPES:
        yield _case((1, 1, 512), dtype)
        yield _case((17, 3, 64), dtype)
        yield _case((9, 5, 272), dtype, masked=True)
        yield _case((33, 8, 768), dtype, masked=True, strided=True)
        yield _case((64, 32, 1024), dtype)
        yield _case((128, 70, 256), dtype, strided=True)
        yield _case((515, 4, 512), dtype, bare=True)
        if grid == "full":
            for width in (16, 32, 64, 128, 208, 256, 512, 768, 1024, 1280, 1536, 2048, 3072, 4096):
                yield _case((1, 2, width), dtype)
                yield _case((7, 3, width), dtype, masked=True)
                yield _case((40, 32, width), dtype)
                yield _case((33, 72, width), dtype, strided=True, bare=width % 512 == 0)
            yield _case((12, 512, 512), dtype)
            yield _case((9, 300, 1280), dtype, masked=True)
            yield _case((4096, 8, 256), dtype)
            yield _case((65536, 2, 64), dtype)
