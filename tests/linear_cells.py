"""The linear rules of the field as matrix-state cells.

Steps are as `elman_core.nn.matrix_reference` wants them: S and k, then the vectors, v and the lines, the scalars.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from elman_core.kernels import Maps, MatrixKernel
from elman_core.nn import matrix_reference

CELL = """
#pragma once
#include <elman/matrix_state_cell.h>
namespace {name} {{
{template}
struct Cell : elman::MatrixCell {{
  static constexpr int {counts};
  static constexpr bool {flags};
  template <class Math, class T>
  static ELMAN_HD elman::MatrixLine<T> line(elman::MatrixIn<T> x) {{
    {line}
  }}
  template <class Math, class T>
  static ELMAN_HD elman::MatrixGrad<Cell, T> line_backward(elman::MatrixLine<T> d, elman::MatrixIn<T> x) {{
    {back}
  }}
}};
}}  // namespace {name}
"""


@dataclass(frozen=True)
class Made:
    """A cell, its step in PyTorch, and what its kernel declares."""

    step: Callable[..., Tensor]
    counts: str
    flags: str
    line: str
    back: str
    declared: dict[str, Any] = field(default_factory=dict)
    template: str = ""

    def kernel(self, name: str, folder: Path) -> MatrixKernel:
        """Its op `elman::matrix_NAME`; a process can have it once. folder: of the header."""
        parts = {n: getattr(self, n) for n in ("template", "counts", "flags", "line", "back")}
        header = folder / f"{name}_cell.h"
        header.write_text(CELL.format(name=name, **parts))
        return MatrixKernel(
            name, header=header, cell=f"{name}::Cell", reference=matrix_reference(self.step), **self.declared
        )


def gated_deltanet(
    s: Tensor, k: Tensor, v: Tensor, decay: Tensor, write: Tensor | None, *, linear_state: bool = False
) -> Tensor:
    kept = decay * s  # what is retrieved has decayed
    new = kept + k * (v - k.mT @ kept) * (1 if write is None else write)
    return new if linear_state else new.tanh()


def deltanet(s: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    return s + k * beta * (v - k.mT @ s)


def kimi_delta(s: Tensor, k: Tensor, decay: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    return deltanet(decay * s, k, v, beta)


def gdn2(s: Tensor, k: Tensor, decay: Tensor, erase: Tensor, v: Tensor, write: Tensor) -> Tensor:
    return decay * s + k * (write * v - (k * erase).mT @ s)


def rwkv7(s: Tensor, k: Tensor, decay: Tensor, read: Tensor, again: Tensor, v: Tensor) -> Tensor:
    return decay * s + k * v + again * (read.mT @ s)


def _removed(inputs: dict[str, Any], options: Mapping[str, Any]) -> None:
    """RWKV-7's: what is read is of length 1, and a part of it is written back with the opposite sign."""
    share, read = inputs["again"], F.normalize(inputs["read"].double() - 0.75, dim=-1)
    inputs["read"], inputs["again"] = read.to(inputs["read"].dtype), (-read * share).to(share.dtype)


GATED = Maps(("q", "k", "v"), ("q", "k"), ("mamba", "sigmoid"))
KIMI = Maps(("k",), ("k",), ("sigmoid",))
DELTANET = Made(
    deltanet,
    counts="scalars = 1",
    flags="squashes = false",
    line="return {T(1), x.c[0] * (x.in[0] - x.r)};",
    back="""const T b = x.c[0] * d.write;
    return {-b, {b}, {d.write * (x.in[0] - x.r)}};""",
    declared={"scalars": ("beta",)},
)
CELLS = {
    "gated_deltanet": Made(  # so that the decay has two gradients
        gated_deltanet,
        template="template <bool Linear, bool Gated>",
        counts="scalars = Gated ? 2 : 1",
        flags="squashes = !Linear",
        line="return {x.c[0], (Gated ? x.c[scalars - 1] : T(1)) * (x.in[0] - x.c[0] * x.r)};",
        back="""elman::MatrixGrad<Cell, T> g{};
    g.in[0] = (Gated ? x.c[scalars - 1] : T(1)) * d.write;
    g.r = -x.c[0] * g.in[0];
    g.c[0] = d.keep - g.in[0] * x.r;
    if (Gated) g.c[scalars - 1] = d.write * (x.in[0] - x.c[0] * x.r);
    return g;""",
        declared={
            "scalars": ("decay", "write"),
            "optional": ("write",),
            "options": ("linear_state",),
            "maps": (GATED,),
        },
    ),
    "deltanet": DELTANET,
    "kimi_delta": replace(
        DELTANET,
        step=kimi_delta,
        counts="scalars = 1, vectors = 1, keep_vector = 0, read_vector = 0",
        declared={"vectors": ("decay",), "scalars": ("beta",), "maps": (KIMI,)},
    ),
    "gdn2": Made(  # erase: the gate times the decay, since what is retrieved has decayed
        gdn2,
        counts="lines = 2, vectors = 2, keep_vector = 0, read_vector = 1",
        flags="squashes = false, backward_uses_r = false",
        line="return {T(1), x.in[1] * x.in[0] - x.r};",
        back="return {-d.write, {d.write * x.in[1], d.write * x.in[0]}};",
        declared={"vectors": ("decay", "erase"), "lines": ("write",)},
    ),
    "rwkv7": Made(
        rwkv7,
        counts="vectors = 3, keep_vector = 0, read_vector = 1, second_vector = 2",
        flags="squashes = false, reads_with_k = false, backward_uses_r = false",
        line="return {T(1), x.in[0], x.r};",
        back="return {d.second, {d.write}};",
        declared={"vectors": ("decay", "read", "again"), "adjust": _removed},
    ),
}
