"""The tensors of the kernels of decoding, and the problems of a first use: outputs only, as nothing has a gradient. Shapes as
in op.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from elman_core.kernels.family import Family, Row, Values
from elman_core.kernels.spec import Case, Cell, Inputs

from . import portable

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NARROW = (torch.bfloat16, torch.float16)
MOST_ROWS = 64
MOST_MAPS = 4
EPS = 1e-5
_MARGIN = 1e-4  # of a threshold and of a race: far beyond the errors of float32
_FIRST_OUTPUTS = 256  # at its first use, a map with more outputs is verified on this many: blocks of 16 are alike
_SEVERAL = (7, 16, 1, 33)


@dataclass(frozen=True, eq=False, kw_only=True)
class SharedCell(Cell):
    """A kernel that every model decodes with. maps: of `linears`, names of the weights beside the first."""

    family: Family
    maps: tuple[str, ...] = ()


def _widest(_cell: Cell, sizes: Values, values: Values) -> None:
    """?: of a verification, the most outputs of a further map."""
    sizes["?"] = max(further(values), default=0)


def _direct(_cell: Cell, sizes: Values, values: Values) -> None:
    """K: of a verification, N for an input that is added as it is."""
    if values.get("direct"):
        sizes["K"] = sizes["N"]


def _scaled(w: Tensor) -> Tensor:
    return w * w.shape[1] ** -0.5


_BKN, _NUMBERS = {"B": "rows", "K": "inputs", "N": "outputs"}, "early stream"
LINEAR = Family(
    "decode_linear",
    sizes=_BKN,
    functions={"": "x weight out"},
    inputs=(
        Row("x", "BK", strides="B"), Row("weight", "NK", draw=_scaled), Row("bias", "N", optional=True, given="bias"),
        Row("map", "?K", names="maps", draw=_scaled),
    ),
    outputs=(Row("out", "BN"), Row("map_out", "B?", names="maps", like="map")),
    numbers=f"activated {_NUMBERS}",
    constants=("int activated",),
    derive=_widest,
)  # fmt: skip
STEP = Family(
    "decode_step",
    sizes=_BKN,
    functions={"": "w h out last"},
    inputs=(
        Row("x", "BK", strides="B"), Row("weight", "NK", optional=True, given="not direct", draw=_scaled),
        Row("bias", "N", optional=True, given="bias"), Row("extra", "BN", names="extras", strides="B"),
        Row("w", "NN", draw=_scaled), Row("h", "BN", "compute"),
    ),
    outputs=(Row("out", "BN"), Row("last", "BN", "compute")),
    members=(Row("u", "BN", strides="B"),),
    numbers=_NUMBERS,
    constants=(),
    derive=_direct,
)  # fmt: skip
NORM = Family(
    "decode_norm",
    sizes={"B": "rows", "D": "width"},
    functions={"": "x weight out stream_out"},
    inputs=(
        Row("x", "BD", strides="B"), Row("residual", "BD", "compute", optional=True, given="adds"),
        Row("weight", "D", draw=lambda w: 1 + 0.1 * w),
    ),
    outputs=(Row("out", "BD"), Row("stream_out", "BD", "compute")),
    numbers=_NUMBERS,
    reals="eps",
    constants=("float eps",),
)  # fmt: skip
DRAW = Family(
    "decode_draw",
    sizes={"B": "rows", "V": "classes"},
    functions={"": "logits drawn shown"},
    inputs=(
        Row("logits", "BV", strides="B", draw=lambda x: 3 * x),
        Row("waits", "BV", "compute", optional=True, given="not greedy", draw=lambda x: -torch.special.log_ndtr(x)),
        Row("seen", "BV", "bool"),
    ),
    members=(Row("drawn", "B", "index"), Row("shown", "B", "index")),
    numbers=f"top_k {_NUMBERS}",
    reals="penalty temperature below",
)


def case(kind: str, sizes: tuple[int, ...], dtype: torch.dtype, **special: Any) -> Case:
    """A problem of "linear" (B, K, N), "norm" (B, D), "draw" (B, V) or "step" (B, K, N).

    Options, all off without: bias; activated; several, or `maps`, the outputs of further maps (linear); adds (norm); penalised,
    greedy, top_k, top_p, each (draw); tied, direct: V is W, or there is none (step).
    """
    made = Case.of({"norm": "BD", "draw": "BV"}.get(kind, "BKN"), sizes, dtype, **special)
    return made if kind == "step" else shared(kind, made)


def shared(kind: str, made: Case) -> Case:
    """A problem of one of the kernels that models share."""
    return replace(made, options={"op": kind, **made.options})


def further(options: Mapping[str, Any]) -> tuple[int, ...]:
    """The outputs of the maps beside the first of `linears`."""
    return options.get("maps") or _SEVERAL * bool(options.get("several"))


def activated_of(weight: Tensor, options: Mapping[str, Any]) -> int:
    """How many outputs of a linear map pass SiLU."""
    return len(weight) // 2 if options.get("activated") and not further(options) else 0


def settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a draw."""
    penalty = 1.7 if options.get("greedy") else 0.8
    top_p = 0.9 if options.get("top_k") else 0.5
    return {
        "penalty": penalty if options.get("penalised") else 1.0,
        "temperature": 0.0 if options.get("greedy") else 0.8,
        "top_k": 40 if options.get("top_k") else 0,
        "top_p": top_p if options.get("top_p") else 1.0,
    }


def most_rows(rows: int) -> int:
    """The most rows of the kernel that takes `rows`. Four kernels are compiled, each verified with its fewest and most rows."""
    return next((most for most in (8, 16, 32) if rows <= most), MOST_ROWS)


def fewest_and_most(most: int) -> tuple[int, int]:
    """The rows of the kernel that takes up to `most`."""
    return 1 if most == 8 else most // 2 + 1, most


def first_use(dtype: torch.dtype, kind: str, *sizes: Any) -> list[Case]:
    """The cases that verify a size at its first use: the fewest and the most rows of its kernel, and each way through it.

    Args:
        kind, sizes: "linear" with the most rows, K, (N, …); "norm" with D; "draw" with V.
    """
    if kind == "norm":
        return [case(kind, (3, *sizes), dtype, adds=adds) for adds in (True, False)]
    if kind == "draw":
        ways: tuple[tuple[int, str], ...] = ((3, ""), (3, "penalised greedy"), (MOST_ROWS, "top_k top_p"))
        return [case(kind, (rows, *sizes), dtype, **dict.fromkeys(words.split(), True)) for rows, words in ways]
    most, inputs, outputs = sizes
    first, *maps = (n if n <= _FIRST_OUTPUTS else _FIRST_OUTPUTS + n % 16 for n in outputs)
    way: dict[str, Any] = {"maps": tuple(maps)} if maps else {"bias": True, "activated": True}
    return [case(kind, (rows, inputs, first), dtype, **way) for rows in fewest_and_most(most)]


def narrow(inputs: Inputs, options: Mapping[str, Any]) -> None:
    """Give each further map of a linear one as many outputs as it has; bias and SiLU belong to a single map."""
    for i, outputs in enumerate(further(options), 1):
        inputs |= {f"w{i}": inputs[f"w{i}"][:outputs], "bias": None}


def clear(inputs: Inputs, options: Mapping[str, Any]) -> None:
    """Draw again what leaves the drawn class in doubt in float32. each: the noise of row i favours class i, so the rows show
    which classes can be drawn."""
    generator = torch.Generator().manual_seed(0)
    how = settings(options)
    rows, classes = inputs["logits"].shape
    count = 1 if options.get("each") else rows
    logits, seen, waits = inputs["logits"][:count], inputs["seen"][:count], inputs["waits"]
    while (unclear := ~_clear_threshold(logits, seen, how)).any():
        logits[unclear] = (3 * torch.randn(int(unclear.sum()), classes, generator=generator)).to(logits.dtype)
    logits, seen = (x.repeat(rows // count, 1) for x in (logits, seen))
    inputs |= {"logits": logits, "seen": seen}
    if waits is None:
        return
    scores = portable.kept_scores(logits.double(), seen, **how)
    while True:
        if options.get("each"):
            waits.clamp_(min=1e-2).fill_diagonal_(1e-20)
        best = F.pad(portable.race(scores, waits.double()), (0, 1)).topk(2, -1).values
        unclear = best[:, 1] > best[:, 0] * (1 - _MARGIN)
        if not unclear.any():
            return
        waits[unclear] = torch.empty(int(unclear.sum()), classes).exponential_(1, generator=generator)


def _clear_threshold(logits: Tensor, seen: Tensor, how: dict[str, Any]) -> Tensor:
    """For each row: whether the same classes can be drawn with a slightly smaller and a slightly larger top-p."""
    shares = (1 - _MARGIN, 1 + _MARGIN) if how["top_p"] < 1 else (1.0, 1.0)
    kept = [portable.kept_scores(logits.double(), seen, **how | {"top_p": how["top_p"] * x}).isfinite() for x in shares]
    return (kept[0] == kept[1]).all(-1)
