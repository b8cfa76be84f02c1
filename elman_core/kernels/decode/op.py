"""The steps of decoding with few rows, one launch each: products as fast as weights can be read, and the steps between them.

    linear   y = x Wᵀ + b, with SiLU of the first columns if asked; `linears` computes several of one x
    norm     R' = R + x,  n = w R' (mean R'² + eps)^(-1/2)
    draw     a class from logits: penalty, temperature, top-k, top-p, and a race of exponentials

The `decode…` sources of `elman_csrc` run on NVIDIA GPUs (sm_80 and newer), for up to 64 rows and without gradients: products in
bfloat16 or float16, the others in float32 too. `takes…` tells whether a call fits; if not, the caller uses plain PyTorch. A
launch that does not fit raises a `KernelError`. The first two are operators known to FakeTensor, `torch.compile` and CUDA
graphs; `draw` is called outside of models.

Shapes: B rows, K inputs, N outputs, D width, V classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from elman_core.kernels.dispatch import Compiled, register, runs
from elman_core.kernels.family import Family
from elman_core.kernels.operators import Operator
from elman_core.kernels.runtime import operator
from elman_core.kernels.spec import Case, Inputs, KernelSpec, Outputs
from elman_core.registry.errors import KernelError

from . import native, portable, spec
from .spec import DRAW, LINEAR, MOST_MAPS, MOST_ROWS, NARROW, NORM, SharedCell

NAME = "decode"
MOST_CLASSES = 256
WIDEST_NORM = 8192


def takes(x: Tensor, *weights: Tensor, bias: Tensor | None = None) -> bool:
    """Whether `linear` runs here, or `linears` of several weights. Compiles and verifies it at the first use of a size. Raises
    `KernelError`: verification found the kernel wrong. bias: of the one weight."""
    width = x.shape[-1]
    fits = native.alone(x) and x.dtype in NARROW
    tensors = weights if bias is None else (*weights, bias)
    for tensor in tensors:
        fits = fits and tensor.dtype == x.dtype and tensor.device == x.device
    if not fits or width % 8 or not 0 < x.numel() <= MOST_ROWS * width or not 1 <= len(weights) <= MOST_MAPS + 1:
        return False
    if any(weight.shape[1] != width for weight in weights) or (bias is not None and bias.shape != weights[0].shape[:1]):
        return False  # plain PyTorch then says what is wrong
    outputs = tuple(int(weight.shape[0]) for weight in weights)
    return runs(NAME, x, "linear", spec.most_rows(x.numel() // width), int(weights[0].shape[1]), outputs)


def linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, activated: int = 0) -> Tensor:
    """x Wᵀ + b, (..., N) in the dtype of x; its first `activated` columns are rounded to that dtype and pass SiLU."""
    return linears(x, [weight_NK], bias_N, activated)[0]


def linears(x: Tensor, weights: Sequence[Tensor], bias_N: Tensor | None = None, activated: int = 0) -> list[Tensor]:
    """x Wᵀ for up to five weights (N_i, K), in one launch. `bias_N` and `activated` need a single weight."""
    first, *others = weights
    if len(others) > MOST_MAPS:
        raise KernelError(f"linears takes up to {MOST_MAPS + 1} weights, not {len(weights)}")
    flat: Sequence[Tensor] = _linears[len(others)].op(x.reshape(-1, x.shape[-1]), first, bias_N, *others, activated)
    return [y_BN.view(*x.shape[:-1], -1) for y_BN in flat]


def takes_norm(x: Tensor, residual: Tensor | None, weight: Tensor, out_dtype: torch.dtype) -> bool:
    """Whether `norm` runs here. Compiles, verifies and raises as `takes`, for each width."""
    width = x.shape[-1]
    return (
        native.alone(x)
        and x.dtype == weight.dtype == out_dtype
        and weight.device == x.device
        and weight.shape == x.shape[-1:]
        and (residual is None or (residual.dtype == torch.float32 and residual.shape == x.shape))
        and (residual is None or residual.device == x.device)
        and width <= WIDEST_NORM
        and 0 < x.numel() <= MOST_ROWS * width
        and runs(NAME, x, "norm", int(weight.shape[0]))
    )


def norm(x: Tensor, residual: Tensor | None, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `elman_core.nn.add_rms_norm`: (n in the dtype of x, the stream in float32), contiguous."""
    width = x.shape[-1]
    n, stream = _norm.op(x.reshape(-1, width), None if residual is None else residual.reshape(-1, width), weight_D, eps)
    return n.view(x.shape), stream.view(x.shape)


def takes_draw(logits_BV: Tensor) -> bool:
    """Whether `draw` runs here, for any number of rows. Compiles, verifies and raises as `takes`, for each V."""
    classes = logits_BV.shape[1]
    return native.alone(logits_BV) and 0 < classes <= MOST_CLASSES and runs(NAME, logits_BV, "draw", int(classes))


def draw(
    logits_BV: Tensor,
    waits_BV: Tensor | None,
    seen_BV: Tensor,
    drawn_B: Tensor,
    shown_B: Tensor,
    *,
    penalty: float,
    temperature: float,
    top_k: int,
    top_p: float,
) -> None:
    """Draw a class for every row, in place.

    Args:
        waits_BV: float32, draws of a standard exponential; may be None for temperature 0, which takes the largest score.
        seen_BV: bool, contiguous: classes that have occurred. With a penalty other than 1, the drawn classes are added.
        drawn_B: int64, receives the classes. shown_B: int64, likewise, but -1 for a row with logits that are not finite.
        top_k: 0 for all. top_p: 1 for all.

    Raises:
        KernelError: a temperature above 0 without waits, or tensors that do not fit together.
    """
    if waits_BV is None and temperature > 0:
        raise KernelError("draw: a temperature above 0 needs waits")
    x = logits_BV if logits_BV.stride(1) == 1 else logits_BV.contiguous()
    given = {"logits": x, "drawn": drawn_B, "shown": shown_B, "penalty": penalty, "temperature": temperature}
    if waits_BV is not None:
        given["waits"] = waits_BV.contiguous()
    if penalty != 1:
        given["seen"] = seen_BV
    given |= {"top_k": min(top_k, x.shape[1]), "below": 1 - top_p if top_p < 1 else -1}
    native.run(_DRAW, "", given, given)


def _run_plain(x: Tensor, *given: Any) -> None:
    how = dict(zip(("penalty", "temperature", "top_p", "top_k"), given[4:], strict=True))
    portable.draw(x.float(), *given[:4], **how)


draw_plain = operator(
    "draw(Tensor logits, Tensor? waits, Tensor(a!) seen, Tensor(b!) drawn, Tensor(c!) shown, float penalty, float temperature, "
    "float top_p, int top_k) -> ()",
    _run_plain,
    lambda *_: None,
)
"""`draw` in plain PyTorch, for any number of classes, dtype and device: one operator, which programs of a CPU repeat."""


def _shared(family: Family, reference: Callable[..., Any], adjust: Any = None, maps: int = 0) -> SharedCell:
    names = tuple(f"w{i}" for i in range(1, 1 + maps))
    return SharedCell(str(maps or family.name), Path(), "", reference, adjust, family=family, maps=names)


_DRAW = _shared(DRAW, portable.race, spec.clear)
_linears = [
    Operator(LINEAR, _shared(LINEAR, portable.linears, spec.narrow, maps), native.run) for maps in range(1 + MOST_MAPS)
]
_norm = Operator(NORM, _shared(NORM, portable.norm), native.run)


class Shared(Compiled):
    """These kernels, for the chooser: a problem is ("linear", most rows, K, (N, …)), ("norm", D) or ("draw", V)."""

    name = NAME

    def prepare(self, dtype: torch.dtype, kind: str, *_sizes: Any) -> str:
        native.module(None, {"linear": LINEAR, "norm": NORM, "draw": DRAW}[kind], dtype, native.here())
        return "one launch"

    def cases(self, dtype: torch.dtype, kind: str, *sizes: Any) -> list[Case]:
        return spec.first_use(dtype, kind, *sizes)

    def spec(self) -> KernelSpec:
        return KernelSpec(
            name=NAME,
            family=NAME,
            make_inputs=_draw_inputs,
            call=_call,
            states=(),
            extension=lambda _target: native.extension(torch.bfloat16),
            op=_operator,
            targets=("cuda",),
            builds=lambda _target, _arch, _widths, dtypes: native.extensions(dtypes),
            module=lambda _target, case: native.extension(case.dtype),
            python=tuple(sorted(Path(__file__).parent.glob("*.py"))),
            record=Path(__file__).with_name("errors.json"),
            differentiable=False,
        )


def _draw_inputs(case: Case, generator: torch.Generator) -> Inputs:
    kind = case.options["op"]
    cell = {"linear": _linears[len(spec.further(case.options))].cell, "norm": _norm.cell, "draw": _DRAW}[kind]
    return cell.family.draw(cell, case, generator)


def _call(backend: str, inputs: Inputs, options: Mapping[str, Any]) -> Outputs:
    """The outputs of one of these kernels by name; in plain PyTorch for the back end "reference"."""
    plain = backend == "reference"
    kind = options["op"]
    if kind == "linear":
        x, weight, bias, *others = inputs.values()
        made = (portable.linears if plain else linears)(x, [weight, *others], bias, spec.activated_of(weight, options))
        return {"linear": made[0]} if not others else {f"linears {i}": y for i, y in enumerate(made)}
    if kind == "norm":
        x, residual, weight = inputs.values()
        n, stream = (portable.norm if plain else norm)(x, residual, weight, spec.EPS)
        return {"n": n, "stream": stream}
    logits, waits, before = inputs.values()
    how = spec.settings(options)
    seen = before.clone(memory_format=torch.contiguous_format)
    drawn, shown = (torch.empty(len(logits), dtype=torch.int64, device=logits.device) for _ in range(2))
    (portable.draw if plain else draw)(logits, waits, seen, drawn, shown, **how)
    # One wrong class or mark must be a large error in any row: compare one-hot rows, and marks where they changed.
    classes = logits.shape[1]
    return {"drawn": F.one_hot(drawn.clamp(0, classes - 1), classes), "shown": shown - drawn, "marked": seen != before}


def _operator(_backend: str, inputs: Inputs, options: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...]] | None:
    """None for `draw`, which is called outside of models and is no operator."""
    if options["op"] == "draw":
        return None
    if options["op"] == "norm":
        return _norm.op, (*inputs.values(), spec.EPS)
    given = tuple(inputs.values())
    return _linears[len(given) - 3].op, (*given, spec.activated_of(given[1], options))


register(Shared())
