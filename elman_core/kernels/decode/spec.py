"""The problems that verify the kernels of decoding: outputs only, since decoding takes no gradients.

Shapes: B rows, K inputs, N outputs, d width of a cell, D of a norm, V classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from elman_core.kernels.build import Extension
from elman_core.kernels.dense.spec import DenseCell
from elman_core.kernels.dispatch import Compiled, register
from elman_core.kernels.runtime import compute_dtype
from elman_core.kernels.spec import Case, Cell, Inputs, KernelSpec, Outputs

from . import grids, op, run
from .run import DTYPES, NARROW

EPS = 1e-5


def spec() -> KernelSpec:
    """The spec of the kernels that every model decodes with: linear maps, norm and draw."""
    return KernelSpec(
        name=op.NAME,
        cases=lambda _target, grid: list(grids.shared_cases(grid)),
        make_inputs=grids.make_inputs,
        call=lambda backend, inputs, options: _CALLS[options["op"]](backend, inputs, options),
        states=(),
        extension=lambda _target: run.extension(torch.bfloat16),
        op=_operator,
        targets=("cuda",),
        builds=lambda _target, _arch, _widths, dtypes: _extensions(dtypes or (torch.bfloat16,), None),
        module=lambda _target, case: run.extension(case.dtype),
        python=tuple(sorted(Path(__file__).parent.glob("*.py"))),
        record=Path(__file__).with_name("errors.json"),
        differentiable=False,
    )


def make_step_spec(
    cell: DenseCell, kernel: Callable[..., tuple[Tensor, Tensor]], operator: Callable[..., tuple[Tensor, Tensor]]
) -> KernelSpec:
    """The spec of the step of a dense cell. kernel: its `DenseKernel`, for plain PyTorch. operator: the launch."""

    def given(inputs: Inputs, options: Mapping[str, Any]) -> tuple[Any, ...]:
        v = inputs["w"] if options["tied"] else inputs.get("v")
        return inputs["x"], v, *(inputs[n] for n in ("bias", *cell.extras, "w", "h"))

    def call(backend: str, inputs: Inputs, options: Mapping[str, Any]) -> Outputs:
        x, v, bias, *extras, w, h = given(inputs, options)
        if backend in ("reference", "torch"):
            y, last = kernel(x[None], *(e[None] for e in extras), w, h, v=v, b=bias, backend=backend)
            return {"y": y[0], "h": last}
        y, last = operator(x, v, bias, *extras, w, h)
        return {"y": y, "h": last}

    return KernelSpec(
        name=f"{cell.name}_step",
        cases=lambda target, grid: list(grids.step_cases(target, grid)),
        make_inputs=lambda case, generator: grids.make_step_inputs(case, generator, cell.extras),
        call=call,
        states=("h",),
        extension=lambda _target: run.extension(torch.bfloat16, cell),
        op=lambda backend, inputs, options: None if backend == "torch" else (operator, given(inputs, options)),
        targets=("cuda",),
        builds=lambda _target, _arch, _widths, dtypes: _extensions(dtypes or (torch.bfloat16,), cell),
        module=lambda _target, case: run.extension(case.dtype, cell),
        python=cell.python(__file__),
        portable=("torch",),
        emulated=tuple(grids.step_cases("host", "quick"))[:3],
        record=cell.header.with_name("errors.json"),
        differentiable=False,
    )


def _extensions(dtypes: Sequence[torch.dtype], cell: Cell | None) -> list[Extension]:
    """One for each dtype that has a kernel."""
    known = DTYPES if cell is None else NARROW
    return [run.extension(dtype, cell) for dtype in dict.fromkeys(dtypes) if dtype in known]


def _linear(backend: str, inputs: Inputs, options: Mapping[str, Any]) -> Outputs:
    x, bias, weights, activated = inputs["x"], inputs["bias"], _weights(inputs), options["activated"]
    if backend != "reference":
        made = op.linears(x, weights, bias, activated)
    else:
        wide = compute_dtype(x)
        made = [F.linear(x.to(wide), w.to(wide), None if bias is None else bias.to(wide)).to(x.dtype) for w in weights]
        made[0] = torch.cat((F.silu(made[0][:, :activated].to(wide)).to(x.dtype), made[0][:, activated:]), 1)
    return {"linear": made[0]} if len(made) == 1 else {f"linears {i}": y for i, y in enumerate(made)}


def _norm(backend: str, inputs: Inputs, _options: Mapping[str, Any]) -> Outputs:
    x, residual, weight = inputs["x"], inputs.get("residual"), inputs["weight"]
    if backend != "reference":
        n, stream = op.norm(x, residual, weight, EPS)
        return {"n": n, "stream": stream}
    stream = x.to(compute_dtype(x)) if residual is None else x.to(compute_dtype(x)) + residual
    scale = (stream.square().mean(-1, keepdim=True) + EPS).rsqrt()
    return {"n": (stream * scale * weight.to(stream.dtype)).to(x.dtype), "stream": stream}


def _draw(backend: str, inputs: Inputs, options: Mapping[str, Any]) -> Outputs:
    logits, waits, before = inputs["logits"], inputs["waits"], inputs["seen"]
    seen = before.clone(memory_format=torch.contiguous_format)
    settings = grids.settings(options)
    drawn, shown = (torch.empty(len(logits), dtype=torch.int64, device=logits.device) for _ in range(2))
    if backend != "reference":
        op.draw(logits, waits, seen, drawn, shown, **settings)
    else:
        drawn = op.race(op.kept_scores(logits, seen, **settings), waits).argmax(-1)
        if settings["penalty"] != 1:
            seen.scatter_(1, drawn[:, None], True)
        shown = drawn.clone()
    # One wrong class or mark must be a large error in any row: compare one-hot rows, and marks where they changed.
    classes = logits.shape[1]
    return {"drawn": F.one_hot(drawn.clamp(0, classes - 1), classes), "shown": shown - drawn, "marked": seen != before}


_CALLS = {"linear": _linear, "norm": _norm, "draw": _draw}


def _operator(_backend: str, inputs: Inputs, options: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...]] | None:
    """None for `draw`, which is called outside of models and is no operator."""
    if options["op"] == "linear":
        return op.linear_op, (inputs["x"], _weights(inputs), inputs["bias"], options["activated"])
    if options["op"] == "norm":
        return op.norm_op, (inputs["x"], inputs["residual"], inputs["weight"], EPS)
    return None


def _weights(inputs: Inputs) -> list[Tensor]:
    return [w for name, w in inputs.items() if name.startswith("w") and w is not None]


class _Shared(Compiled):
    """The shared kernels, for the chooser: a problem is ("linear", most rows, K, (N, …)), ("norm", D) or ("draw", V)."""

    name = op.NAME

    def prepare(self, dtype: torch.dtype, kind: str, *_sizes: Any) -> str:
        run.module(None, kind, dtype, run.here())
        return "one launch"

    def cases(self, dtype: torch.dtype, *problem: Any) -> Sequence[Case]:
        return list(grids.first_use(dtype, *problem))

    def spec(self) -> KernelSpec:
        return spec()


register(_Shared())
