"""`Step`: one time step of a dense cell and the projection in front of it, in one launch. T time, B rows, K inputs, d width."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from elman_core.kernels.dense.spec import DenseCell
from elman_core.kernels.dispatch import Compiled, register, runs
from elman_core.kernels.operators import Operator
from elman_core.kernels.spec import Case, Inputs, KernelSpec, Outputs

from . import native
from .spec import MOST_ROWS, NARROW, STEP, case, fewest_and_most, most_rows

MOST_EXTRAS = 4


class Step(Compiled):
    """a = x Vᵀ + b + h Wᵀ, or x + b + h Wᵀ;  (h, y) = cell(a, h, e), for a cell that reads up to four extras.

    kernel: the `DenseKernel` of the cell, which takes such a step where this does not run.
    """

    def __init__(self, cell: DenseCell, kernel: Callable[..., tuple[Tensor, Tensor]]) -> None:
        self.cell, self.name, self._kernel = cell, f"{cell.name}_step", kernel
        self._operator = Operator(STEP, cell, native.run)
        self.op = self._operator.op
        register(self)

    def spec(self) -> KernelSpec:
        cell = self.cell
        drawn_as = replace(cell, adjust=None, accumulates=None)  # which are of many steps

        def given(inputs: Inputs, options: Mapping[str, Any]) -> tuple[Any, ...]:
            x, v, bias, *rest = inputs.values()
            tied = options.get("tied") and v is not None and v.shape == rest[-2].shape
            return x, rest[-2] if tied else v, bias, *rest

        def call(backend: str, inputs: Inputs, options: Mapping[str, Any]) -> Outputs:
            x, v, bias, *extras, w, h = given(inputs, options)
            if backend in ("reference", "torch"):
                (y,), last = self._kernel(x[None], *(e[None] for e in extras), w, h, v=v, b=bias, backend=backend)
            else:
                y, last = self.op(x, v, bias, *extras, w, h)
            return {"y": y, "h": last}

        return self._operator.spec(
            self._kernel,
            ("y", "h"),
            name=self.name,
            make_inputs=lambda case, generator: STEP.draw(drawn_as, case, generator),
            call=call,
            extension=lambda _target: native.extension(torch.bfloat16, cell),
            op=lambda backend, inputs, options: None if backend == "torch" else (self.op, given(inputs, options)),
            targets=("cuda",),
            builds=lambda _target, _arch, _widths, dtypes: native.extensions(dtypes, cell),
            module=lambda _target, case: native.extension(case.dtype, cell),
            portable=("torch",),
            emulated=(
                case("step", (1, 40, 40), NARROW[0], tied=True, bias=True),
                case("step", (5, 72, 96), NARROW[0], strided=True),
                case("step", (20, 64, 64), NARROW[0], tied=True, bias=True, strided=True),
            ),
            differentiable=False,
        )

    def prepare(self, dtype: torch.dtype, *_problem: int) -> str:
        """As `dispatch.Compiled`; a problem is (most rows, K, d), with K = 0 where there is no V."""
        native.module(self.cell, STEP, dtype, native.here())
        return "one launch"

    def cases(self, dtype: torch.dtype, most: int, inputs: int, width: int) -> Sequence[Case]:
        fewest, _ = fewest_and_most(most)
        options = {"bias": True, "direct": not inputs}
        return [
            case("step", (fewest, inputs or width, width), dtype, tied=inputs == width, **options),
            case("step", (most, inputs or width, width), dtype, tied=False, **options),
        ]

    def takes(self, x_TBK: Tensor, v_dK: Tensor | None, w_dd: Tensor, *flags_TB: Tensor | None) -> bool:
        """Whether this is a single step without mask and starts that runs here. Compiles, verifies and raises as `op.takes`."""
        if x_TBK.dim() != 3 or x_TBK.shape[0] != 1 or any(f is not None for f in flags_TB):
            return False
        if not native.alone(x_TBK) or x_TBK.dtype not in NARROW or w_dd.shape[0] % 8 or x_TBK.shape[2] % 8:
            return False
        if any(w.dtype != x_TBK.dtype or w.device != x_TBK.device for w in (v_dK, w_dd) if w is not None):
            return False
        rows = int(x_TBK.shape[1])
        inputs = 0 if v_dK is None else int(x_TBK.shape[2])
        return 0 < rows <= MOST_ROWS and runs(self.name, x_TBK, most_rows(rows), inputs, int(w_dd.shape[0]))

    def __call__(self, x_1BK: Tensor, v_dK: Tensor | None, bias_d: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
        """`step(x, v, bias, *extras, w, h) -> (y (1, B, d) in the dtype of x, h (B, d) in float32)`.

        Args:
            x_1BK: the cell's input before its projection. v_dK, bias_d: that projection. v may be w itself, which is then read
                once, or None if x is (1, B, d). extras: (1, B, d) each. w: (d, d), rows are outputs. h: (B, d), float32.

        Raises:
            KernelError: the GPU, the number of rows or the tensors do not fit: ask `takes` first.
        """
        *extras, w_dd, h_Bd = rest
        y_Bd, last_Bd = self.op(x_1BK[0], v_dK, bias_d, *(e[0] for e in extras), w_dd, h_Bd.float())
        return y_Bd[None], last_Bd
