"""`Step`: one time step of a dense cell and the projection in front of it, in one launch. T time, B rows, K inputs, d width."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from elman_core.kernels.dense.spec import DenseCell
from elman_core.kernels.dispatch import Compiled, register, runs
from elman_core.kernels.launch import readable, whole
from elman_core.kernels.runtime import operator
from elman_core.kernels.spec import Case, KernelSpec

from . import grids, run, spec

MOST_EXTRAS = 4


class Step(Compiled):
    """a = x Vᵀ + b + h Wᵀ, or x + b + h Wᵀ;  (h, y) = cell(a, h, e), for a cell that reads up to four extras.

    Args:
        cell: of the recurrence. kernel: its `DenseKernel`, which takes such a step where this does not run.
    """

    def __init__(self, cell: DenseCell, kernel: Callable[..., tuple[Tensor, Tensor]]) -> None:
        self.cell, self.name, self._kernel = cell, f"{cell.name}_step", kernel
        extras = "".join(f", Tensor e{i}" for i in range(len(cell.extras)))
        given = f"Tensor x, Tensor? v, Tensor? bias{extras}, Tensor w, Tensor h"
        self.op = operator(f"dense_{self.name}({given}) -> (Tensor, Tensor)", self._run, _fake_step)
        register(self)

    def spec(self) -> KernelSpec:
        """What `elman verify` checks."""
        return spec.make_step_spec(self.cell, self._kernel, self.op)

    def prepare(self, dtype: torch.dtype, *_problem: int) -> str:
        """As `dispatch.Compiled`; a problem is (most rows, K, d), with K = 0 where there is no V."""
        run.module(self.cell, "step", dtype, run.here())
        return "one launch"

    def cases(self, dtype: torch.dtype, most: int, inputs: int, width: int) -> Sequence[Case]:
        return grids.first_step(dtype, most, inputs, width)

    def takes(self, x_TBK: Tensor, v_dK: Tensor | None, w_dd: Tensor, *flags_TB: Tensor | None) -> bool:
        """Whether this is a single step without mask and starts that runs here. Compiles, verifies and raises as `op.takes`."""
        if x_TBK.dim() != 3 or x_TBK.shape[0] != 1 or any(f is not None for f in flags_TB):
            return False
        if not run.alone(x_TBK) or x_TBK.dtype not in run.NARROW or w_dd.shape[0] % 8 or x_TBK.shape[2] % 8:
            return False
        if any(w.dtype != x_TBK.dtype or w.device != x_TBK.device for w in (v_dK, w_dd) if w is not None):
            return False
        rows, inputs, width = int(x_TBK.shape[1]), 0 if v_dK is None else int(x_TBK.shape[2]), int(w_dd.shape[0])
        return 0 < rows <= run.MOST_ROWS and runs(self.name, x_TBK, run.most_rows(rows), inputs, width)

    def __call__(self, x_1BK: Tensor, v_dK: Tensor | None, bias_d: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
        """`step(x, v, bias, *extras, w, h) -> (y (1, B, d) in the dtype of x, h (B, d) in float32)`.

        Args:
            x_1BK: the cell's input before its projection. v_dK, bias_d: that projection. v may be w itself, which is then read
                once, or None if x is (1, B, d). extras: (1, B, d) each. w: (d, d), rows are outputs. h: (B, d), float32.

        Raises:
            KernelError: the GPU, the number of rows or the tensors do not fit: ask `takes` first.
        """
        *extras, w_dd, h_Bd = rest
        y_Bd, last_Bd = self.op(x_1BK[0], v_dK, bias_d, *(e[0] for e in extras), w_dd, h_Bd)
        return y_Bd[None], last_Bd

    def _run(self, x: Tensor, v: Tensor | None, bias: Tensor | None, *rest: Tensor) -> tuple[Tensor, Tensor]:
        *extras, w, h = rest
        tied = v is not None and v.data_ptr() == w.data_ptr() and (v.shape, v.stride()) == (w.shape, w.stride())
        x, w, h = readable(x), whole(w), whole(h.float())
        v = w if tied else whole(v)
        y, last = x.new_empty(len(x), len(w)), torch.empty_like(h)
        run.run(
            self.cell, "step", x, (w,) if v is None else (v, w),
            x=None if v is None else x, u=x if v is None else None, weight=v,
            bias=None if bias is None else bias.contiguous(), w=w, h=h, out=y, last=last,
            extra=[e if e.stride(1) == 1 else e.contiguous() for e in extras],
        )  # fmt: skip
        return y, last


def _fake_step(x_BK: Tensor, _v: Tensor | None, _bias: Tensor | None, *rest: Tensor) -> tuple[Tensor, Tensor]:
    w, h = rest[-2:]
    return x_BK.new_empty(x_BK.shape[0], w.shape[0]), h.new_empty(h.shape, dtype=torch.float32)
