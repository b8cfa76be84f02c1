"""Grids and inputs for decode/spec.py. The tests run the cases of the "host" on emulated threads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from elman_core.kernels.runtime import compute_dtype
from elman_core.kernels.spec import Case, Grid, Inputs, Target

from . import op as decode
from .run import DTYPES, NARROW, fewest_rows

_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64)
_MARGIN = 1e-4  # of a threshold and of a race: far beyond the errors of float32
_FIRST_OUTPUTS = 256  # at its first use, a map with more outputs is verified on this many: blocks of 16 are alike
_DRAWS: tuple[dict[str, Any], ...] = (
    {"penalty": 1.0, "temperature": 1.0, "top_k": 0, "top_p": 1.0},
    {"penalty": 1.7, "temperature": 0.0, "top_k": 0, "top_p": 1.0},
    {"penalty": 1.0, "temperature": 0.8, "top_k": 40, "top_p": 0.9},
    {"penalty": 0.8, "temperature": 0.7, "top_k": 0, "top_p": 0.5},
)


def settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of `decode.draw` among a case's options."""
    return {name: options[name] for name in _DRAWS[0]}


def _linear(
    rows: int, inputs: int, *outputs: int, dtype: torch.dtype, bias: bool = False, activated: int = 0, **special: bool
) -> Case:
    options = {"op": "linear", "outputs": outputs, "bias": bias, "activated": activated}
    return Case.of("BK", (rows, inputs), dtype, **options, **special)


def _norm(rows: int, width: int, dtype: torch.dtype, adds: bool = True, **special: bool) -> Case:
    return Case.of("BD", (rows, width), dtype, op="norm", adds=adds, **special)


def _draw(
    rows: int, classes: int, dtype: torch.dtype, how: dict[str, Any], each: bool = False, **special: bool
) -> Case:
    """each: the noise of row i favours class i, so the rows show which classes can be drawn."""
    return Case.of("BV", (rows, classes), dtype, op="draw", **how, each=each, **special)


def shared_cases(grid: Grid) -> Iterator[Case]:
    """About 40 small ones for "quick", about 400 for "full"."""
    for dtype in NARROW:
        yield _linear(1, 1536, 3072, dtype=dtype, activated=3072)
        yield _linear(3, 72, 40, dtype=dtype, bias=True, activated=24, strided=True)
        yield _linear(8, 2600, 17, dtype=dtype, bias=True)
        yield _linear(13, 64, 24, dtype=dtype, strided=True)
        yield _linear(30, 1280, 256, dtype=dtype, bias=True, activated=128)
        yield _linear(64, 1096, 1288, dtype=dtype, bias=True)
        yield _linear(1, 1536, 1536, 512, 512, 32, dtype=dtype)
        yield _linear(33, 72, 40, 7, 16, 1, 33, dtype=dtype)
    for dtype in DTYPES:
        yield _norm(1, 1536, dtype)
        yield _norm(64, 1281, dtype, strided=True)
        yield _norm(5, 8192, dtype, adds=False)
        for how in _DRAWS:
            yield _draw(64, 256, dtype, how)
        yield _draw(256, 256, dtype, _DRAWS[2], each=True, strided=True)
        yield _draw(7, 77, dtype, _DRAWS[3])
    if grid == "full":
        yield from _full_cases()


def _full_cases() -> Iterator[Case]:
    shapes = ((64, 32), (768, 768), (1000, 77), (1280, 1295), (1536, 3072), (4096, 1024), (8192, 264))
    for dtype in NARROW:
        for rows in _ROWS:
            for inputs, outputs in shapes:
                special = {"bias": rows % 2 == 0, "strided": rows in (7, 31)}
                yield _linear(rows, inputs, outputs, dtype=dtype, activated=outputs // 2, **special)
            yield _linear(rows, 2048, 2048, 17, 640, dtype=dtype)
        yield _linear(8, 14400, 40, dtype=dtype, bias=True)  # rows that no block can hold
    for dtype in DTYPES:
        for width in (1, 31, 255, 256, 257, 768, 1280, 2048, 4096):
            yield _norm(8, width, dtype)
            yield _norm(63, width, dtype, adds=False, strided=True)
        for classes in (1, 2, 31, 33, 128, 255, 256):
            for how in _DRAWS:
                yield _draw(5, classes, dtype, how, strided=True)
                if classes > 2 and how["temperature"]:
                    yield _draw(classes, classes, dtype, how, each=True)


def _step(
    shape: tuple[int, int, int], dtype: torch.dtype, tied: bool = False, bias: bool = True, **special: Any
) -> Case:
    return Case.of("BKd", shape, dtype, tied=tied, bias=bias, **special)


def step_cases(target: Target, grid: Grid) -> Iterator[Case]:
    """About 20 for "quick", about 200 for "full"; for the host few and tiny ones."""
    for dtype in NARROW:
        yield _step((1, 40, 40), dtype, tied=True)
        yield _step((5, 72, 96), dtype, bias=False, strided=True)
        yield _step((20, 64, 64), dtype, tied=True, strided=True)
        yield _step((64, 40, 32), dtype)
        yield _step((3, 0, 48), dtype, strided=True)
        if target == "host":
            continue
        yield _step((1, 1536, 1536), dtype, tied=True)
        yield _step((1, 1280, 1280), dtype)
        yield _step((3, 1000, 1008), dtype)
        yield _step((8, 768, 768), dtype, tied=True)
        yield _step((13, 1536, 1536), dtype, bias=False)
        yield _step((64, 1280, 1280), dtype, tied=True)
        yield _step((8, 0, 1280), dtype, bias=False)
        if grid == "full":
            for rows in _ROWS:
                for width in (64, 520, 1536, 2048):
                    yield _step((rows, width, width), dtype, tied=rows % 2 == 0, bias=rows % 3 > 0)
                yield _step((rows, 264, 1032), dtype, strided=True)
                yield _step((rows, 0, 1032), dtype)
            yield _step((8, 7168, 7168), dtype, tied=True)  # rows that no block can hold


def first_use(dtype: torch.dtype, kind: str, *sizes: Any) -> Iterator[Case]:
    """The cases that verify a size at its first use: the fewest and the most rows of its kernel, and each way through it.

    Args:
        kind, sizes: "linear" with the most rows, K, (N, …); "norm" with D; "draw" with V.
    """
    if kind == "norm":
        yield from (_norm(3, sizes[0], dtype, adds) for adds in (True, False))
    elif kind == "draw":
        yield from (_draw(3, sizes[0], dtype, how) for how in _DRAWS[:2])
        yield _draw(min(sizes[0], 64), sizes[0], dtype, _DRAWS[2])
    else:
        most, inputs, outputs = sizes
        fewer = [n if n <= _FIRST_OUTPUTS else _FIRST_OUTPUTS + n % 16 for n in outputs]
        for rows in (fewest_rows(most), most):
            one = len(fewer) == 1
            yield _linear(rows, inputs, *fewer, dtype=dtype, bias=one, activated=fewer[0] // 2 if one else 0)


def first_step(dtype: torch.dtype, most: int, inputs: int, width: int) -> list[Case]:
    """The cases that verify a cell's step at its first use."""
    fewest = fewest_rows(most)
    return [_step((fewest, inputs, width), dtype, tied=inputs == width), _step((most, inputs, width), dtype)]


def make_inputs(case: Case, generator: torch.Generator) -> Inputs:
    """Inputs of the shared kernels, about 1 in size; those of `draw` leave no doubt about the class in float32."""
    op = case.options["op"]
    if op == "draw":
        return _draw_inputs(case, generator)
    rows = case.sizes["B"]
    if op == "norm":
        width = case.sizes["D"]
        residual = _random(generator, compute_dtype(case.dtype), rows, width) if case.options["adds"] else None
        weight = 1 + 0.1 * _random(generator, torch.float32, width)
        return {"x": _random(generator, case.dtype, rows, width), "residual": residual, "weight": weight.to(case.dtype)}
    inputs, outputs = case.sizes["K"], case.options["outputs"]
    found: Inputs = {"x": _random(generator, case.dtype, rows, inputs)}
    for i, each in enumerate(outputs):
        found[f"w{i}"] = _random(generator, case.dtype, each, inputs, scale=inputs**-0.5)
    found["bias"] = _random(generator, case.dtype, outputs[0]) if case.options["bias"] else None
    return found


def make_step_inputs(case: Case, generator: torch.Generator, extras: Sequence[str]) -> Inputs:
    """Inputs of the step of a cell that reads `extras`; K = 0: without a projection."""
    rows, inputs, width = (case.sizes[k] for k in "BKd")
    found: Inputs = {"x": _random(generator, case.dtype, rows, inputs or width)}
    if inputs and not case.options["tied"]:
        found["v"] = _random(generator, case.dtype, width, inputs, scale=inputs**-0.5)
    found["bias"] = _random(generator, case.dtype, width) if case.options["bias"] else None
    found |= {name: _random(generator, case.dtype, rows, width) for name in extras}
    found["w"] = _random(generator, case.dtype, width, width, scale=width**-0.5)
    found["h"] = _random(generator, compute_dtype(case.dtype), rows, width)
    return found


def _random(generator: torch.Generator, dtype: torch.dtype, *shape: int, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape, generator=generator)).to(dtype)


def _draw_inputs(case: Case, generator: torch.Generator) -> Inputs:
    rows, classes, options = case.sizes["B"], case.sizes["V"], case.options
    how = settings(options)
    count = 1 if options["each"] else rows
    logits = _random(generator, case.dtype, count, classes, scale=3.0)
    seen = torch.rand(count, classes, generator=generator) < 0.2
    while (unclear := ~_clear_threshold(logits, seen, how)).any():
        logits[unclear] = _random(generator, case.dtype, int(unclear.sum()), classes, scale=3.0)
    if options["each"]:
        logits, seen = logits.repeat(rows, 1), seen.repeat(rows, 1)
    if not options["temperature"]:
        return {"logits": logits, "waits": None, "seen": seen}
    waits = torch.empty(rows, classes).exponential_(1, generator=generator)
    scores = decode.kept_scores(logits.double(), seen, **how)
    while True:
        if options["each"]:
            waits.clamp_(min=1e-2).fill_diagonal_(1e-20)
        first, second = _best_two(decode.race(scores, waits.double()))
        unclear = second > first * (1 - _MARGIN)
        if not unclear.any():
            return {"logits": logits, "waits": waits, "seen": seen}
        waits[unclear] = torch.empty(int(unclear.sum()), classes).exponential_(1, generator=generator)


def _best_two(values: Tensor) -> tuple[Tensor, Tensor]:
    best = values.topk(min(2, values.shape[1]), -1).values
    return best[:, 0], best[:, 1] if values.shape[1] > 1 else torch.zeros_like(best[:, 0])


def _clear_threshold(logits: Tensor, seen: Tensor, how: dict[str, Any]) -> Tensor:
    """For each row: whether the same classes can be drawn with a slightly smaller and a slightly larger top-p."""
    if how["top_p"] >= 1:
        return torch.ones(len(logits), dtype=torch.bool)
    kept = [
        decode.kept_scores(logits.double(), seen, **(how | {"top_p": how["top_p"] * share})).isfinite()
        for share in (1 - _MARGIN, 1 + _MARGIN)
    ]
    return (kept[0] == kept[1]).all(-1)
