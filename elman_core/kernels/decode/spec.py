"""The problems on which the kernels of few rows are verified: outputs only, since decoding takes no gradients.

Shapes: B rows, K inputs, N outputs, d width of a cell, D of a norm, V classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from elman_core.kernels.build import Extension
from elman_core.kernels.cell import Cell
from elman_core.kernels.runtime import compute_dtype
from elman_core.kernels.spec import Case, Grid, Inputs, KernelSpec, Outputs, Target

from . import grids, launches, portable, run
from .grids import DrawSettings
from .run import DTYPES, NARROW

NAME = "decode"
EPS = 1e-5
_SOURCES = tuple(sorted(Path(__file__).parent.glob("*.py")))


def spec() -> KernelSpec:
    """What `verify` knows of the kernels that every model decodes with: linear maps, norm and draw."""
    return KernelSpec(
        name=NAME,
        cases=grids.shared_cases,
        make_inputs=grids.make_inputs,
        call=lambda backend, inputs, options: _CALLS[options["op"]](backend, inputs, options),
        states=(),
        extension=lambda _target: run.extension(torch.bfloat16),
        op=_op,
        targets=("cuda",),
        builds=lambda _target, _arch, _widths, dtypes: _extensions(dtypes or (torch.bfloat16,), None),
        needs=lambda _target, cases: _extensions([c.dtype for c in cases], None),
        python=_SOURCES,
        record=Path(__file__).with_name("errors.json"),
        differentiable=False,
    )


def make_step_spec(
    cell: Cell, kernel: Callable[..., tuple[Tensor, Tensor]], operator: Callable[..., tuple[Tensor, Tensor]]
) -> KernelSpec:
    """What `verify` knows of the step of a dense cell.

    Args:
        kernel: `kernel(x, *extras, w, h, v=…, b=…, backend=…)`, what takes a step in plain PyTorch. operator: the launch.
    """

    def call(backend: str, inputs: Inputs, options: Mapping[str, Any]) -> Outputs:
        x, bias, w, h = inputs["x"], inputs.get("bias"), inputs["w"], inputs["h"]
        assert x is not None
        assert w is not None
        assert h is not None
        v = w if options.get("tied") else inputs.get("v")
        extras = [_given(inputs, name) for name in cell.extras]
        if backend == "reference":
            wide = compute_dtype(x)
            u = x.to(wide) if v is None else F.linear(x.to(wide), v.to(wide))
            u = (u if bias is None else u + bias).to(x.dtype)
            y, last = cell.reference(u[None], *(e[None] for e in extras), w, h, None)
            return {"y": y[0], "h": last}
        if backend == "torch":
            y, last = kernel(x[None], *(e[None] for e in extras), w, h, v=v, b=bias, backend="torch")
            return {"y": y[0], "h": last}
        y, last = operator(x, v, bias, *extras, w, h)
        return {"y": y, "h": last}

    def op(backend: str, inputs: Inputs, options: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...]] | None:
        if backend == "torch":
            return None
        v = inputs["w"] if options.get("tied") else inputs.get("v")
        return operator, (
            inputs["x"], v, inputs.get("bias"), *(inputs[n] for n in cell.extras), inputs["w"], inputs["h"]
        )  # fmt: skip

    def cases(target: Target, grid: Grid) -> list[Case]:
        return grids.step_cases(target, grid)

    return KernelSpec(
        name=f"{cell.name}_step",
        cases=cases,
        make_inputs=lambda case, generator: grids.make_step_inputs(case, generator, cell.extras),
        call=call,
        states=("h",),
        extension=lambda _target: run.extension(torch.bfloat16, cell),
        op=op,
        targets=("cuda",),
        builds=lambda _target, _arch, _widths, dtypes: _extensions(dtypes or (torch.bfloat16,), cell),
        needs=lambda _target, cases: _extensions([c.dtype for c in cases], cell),
        python=cell.python(*map(str, _SOURCES)),
        portable=("torch",),
        record=cell.header.with_name("errors.json"),
        differentiable=False,
    )


def _extensions(dtypes: Sequence[torch.dtype], cell: Cell | None) -> list[Extension]:
    """One for each dtype that there is a kernel for."""
    known = DTYPES if cell is None else NARROW
    return [run.extension(dtype, cell) for dtype in dict.fromkeys(dtypes) if dtype in known]


def _given(inputs: Inputs, name: str) -> Tensor:
    found = inputs[name]
    assert found is not None
    return found


def _linear(backend: str, inputs: Inputs, options: Mapping[str, Any]) -> Outputs:
    x, w, bias, activated = _given(inputs, "x"), _given(inputs, "w"), inputs.get("bias"), options.get("activated", 0)
    if backend != "reference":
        return {"linear": launches.linear(x, w, bias, activated)}
    wide = compute_dtype(x)
    y = F.linear(x.to(wide), w.to(wide), None if bias is None else bias.to(wide)).to(x.dtype)
    return {"linear": torch.cat((F.silu(y[:, :activated].to(wide)).to(x.dtype), y[:, activated:]), 1)}


def _linears(backend: str, inputs: Inputs, _options: Mapping[str, Any]) -> Outputs:
    x, weights = _given(inputs, "x"), list(_weights(inputs))
    if backend == "reference":
        made = [F.linear(x.to(compute_dtype(x)), w.to(compute_dtype(x))).to(x.dtype) for w in weights]
    else:
        made = launches.linears(x, weights)
    return {f"linears {i}": y for i, y in enumerate(made)}


def _norm(backend: str, inputs: Inputs, _options: Mapping[str, Any]) -> Outputs:
    x, residual, weight = _given(inputs, "x"), inputs.get("residual"), _given(inputs, "weight")
    if backend != "reference":
        n, stream = launches.norm(x, residual, weight, EPS)
        return {"n": n, "stream": stream}
    stream = x.to(compute_dtype(x)) if residual is None else x.to(compute_dtype(x)) + residual
    scale = (stream.square().mean(-1, keepdim=True) + EPS).rsqrt()
    return {"n": (stream * scale * weight.to(stream.dtype)).to(x.dtype), "stream": stream}


def _draw(backend: str, inputs: Inputs, options: Mapping[str, Any]) -> Outputs:
    logits, waits, before = _given(inputs, "logits"), inputs["waits"], _given(inputs, "seen")
    seen = before.clone(memory_format=torch.contiguous_format)
    settings: DrawSettings = {k: options[k] for k in ("penalty", "temperature", "top_k", "top_p")}  # type: ignore[assignment]
    drawn, shown = (torch.empty(len(logits), dtype=torch.int64, device=logits.device) for _ in range(2))
    if backend != "reference":
        launches.draw(logits, waits, seen, drawn, shown, **settings)
    else:
        drawn = portable.race(portable.kept_scores(logits, seen, **settings), waits).argmax(-1)
        if settings["penalty"] != 1:
            seen.scatter_(1, drawn[:, None], True)
        shown = drawn.clone()
    # One wrong class or mark must be a large error, in whatever row: a one of B, not a number, nor a bit of B V.
    classes = logits.shape[1]
    return {"drawn": F.one_hot(drawn.clamp(0, classes - 1), classes), "shown": shown - drawn, "marked": seen != before}


_CALLS: dict[str, Callable[[str, Inputs, Mapping[str, Any]], Outputs]] = {
    "linear": _linear, "linears": _linears, "norm": _norm, "draw": _draw,
}  # fmt: skip


def _op(_backend: str, inputs: Inputs, options: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...]] | None:
    """`draw` is no operator: it is called outside of models."""
    x = inputs.get("x")
    if options["op"] == "linear":
        return launches.linear_op, (x, inputs["w"], inputs.get("bias"), options.get("activated", 0))
    if options["op"] == "linears":
        return launches.linears_op, (x, list(_weights(inputs)))
    if options["op"] == "norm":
        return launches.norm_op, (x, inputs.get("residual"), inputs["weight"], EPS)
    return None


def _weights(inputs: Inputs) -> Iterator[Tensor]:
    yield from (w for name, w in inputs.items() if name.startswith("w") and w is not None)
