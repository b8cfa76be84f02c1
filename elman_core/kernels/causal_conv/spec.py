"""The problems on which the causal convolution is verified. T time, B batch, C channels, K taps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from elman_core.kernels.build import Extension
from elman_core.kernels.spec import Case, Grid, Inputs, KernelSpec, Outputs, padding_mask

from .reference import reference

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_case = partial(Case.of, "TBCK")


def make_spec(name: str, operator: Callable[..., Any], extension: Callable[..., Extension]) -> KernelSpec:
    """The spec of the kernel. Options of a case: bias; silu; packed: documents start inside its rows; sliced: x is a slice of a
    wider tensor (B, T, C)."""

    def given(inputs: Inputs, options: Mapping[str, Any]) -> tuple[Any, ...]:
        x, *rest = (inputs[n] for n in ("x", "weight", "bias", "window", "mask", "starts"))
        if options.get("sliced"):
            assert x is not None
            x = F.pad(x, (8, 8)).transpose(0, 1).contiguous()[..., 8:-8].transpose(0, 1)
        return x, *rest, options.get("silu", False)

    def call(backend: str, inputs: Inputs, options: Mapping[str, Any]) -> Outputs:
        y, last = (reference if backend == "reference" else operator)(*given(inputs, options))
        return {"y": y, "window": last}

    return KernelSpec(
        name=name,
        cases=lambda _target, grid: [case for dtype in DTYPES for case in _cases(grid, dtype)],
        make_inputs=_make_inputs,
        call=call,
        states=("window",),
        extension=lambda _target: extension(),
        op=lambda _backend, inputs, options: (operator, given(inputs, options)),
        targets=("cuda",),
        emulated=tuple(first_use(torch.bfloat16, 4)[1:]),
        module=lambda _target, case: extension(case.dtype, case.sizes["K"]),
        visible=lambda inputs: {"y": mask[..., None]} if (mask := inputs["mask"]) is not None else {},
        python=tuple(sorted(Path(__file__).parent.glob("*.py"))),
        record=Path(__file__).with_name("errors.json"),
    )


def first_use(dtype: torch.dtype, taps: int) -> list[Case]:
    """The cases that verify a dtype and K at their first use."""
    return [
        _case((131, 5, 264, taps), dtype, silu=True, sliced=True),
        _case((67, 9, 136, taps), dtype, masked=True, packed=True, bias=True),
        _case((131, 3, 37, taps), dtype, silu=True, bias=True),  # no row starts aligned
    ]


def _make_inputs(case: Case, generator: torch.Generator) -> Inputs:
    steps, rows, channels, taps = (case.sizes[k] for k in "TBCK")

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "x": random(steps, rows, channels).to(case.dtype),
        "mask": padding_mask(steps, rows, generator) if case.masked else None,
        "starts": torch.rand(steps, rows, generator=generator) < 0.1 if case.options.get("packed") else None,
        "weight": random(channels, taps),
        "bias": random(channels) if case.options.get("bias") else None,
        "window": None if case.bare else random(rows, taps - 1, channels),
    }


def _cases(grid: Grid, dtype: torch.dtype) -> list[Case]:
    cases = [
        *first_use(dtype, 4),
        _case((1, 3, 512, 4), dtype, silu=True, bias=True),
        _case((1, 70, 40, 4), dtype, masked=True),
        _case((300, 5, 520, 4), dtype, strided=True, silu=True),
        _case((18, 5, 64, 2), dtype, bare=True, bias=True),
        _case((64, 3, 64, 7), dtype, masked=True, packed=True, silu=True),
    ]
    if grid == "full":
        cases += [case for taps in (2, 3, 8, 12) for case in first_use(dtype, taps)]
        for sizes in ((1, 9, 264, 4), (15, 3, 136, 4), (65, 2, 37, 3), (512, 64, 3072, 4), (4096, 2, 512, 4)):
            cases += [_case(sizes, dtype, silu=True), _case(sizes, dtype, masked=True, packed=True, sliced=True)]
    return cases
