"""`elman::dense_NAME` and its backward: a dense recurrence as `torch.library` and the chooser know it.

With tied weights, W projects the input too, and one launch computes

    a_t = W h_{t-1} + W x_t + b = W (h_{t-1} + x_t) + b,   x = silu(v),   (h_t, y_t) = cell(a_t, h_{t-1}, e_t)

The kernel adds x_{t+1} to the state it hands to the next step, so one product covers both, and no product over all steps comes
before the loop. In the backward the loop's product is the gradient of x:

    s_t = h_{t-1} + x_t,   dx_t = W^T da_t,   dW = sum over t of da_t s_t^T,   db = sum over t of da_t

The launch computes SiLU, its derivative and all of these but dW, which is one product over all places. A separate projection
would cost three such products (W x and its two gradients) and an addition of two dW. Shapes as in op.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from elman_core.kernels import build
from elman_core.kernels.build import Extension
from elman_core.kernels.dispatch import Compiled, register
from elman_core.kernels.operators import Operator
from elman_core.kernels.runtime import compute_dtype
from elman_core.kernels.spec import Case, Inputs, KernelSpec, Outputs, first_steps

from . import native, portable
from .spec import BLOCK_EMULATED, EMULATED, DenseCell, family_of


class Recurrence(Compiled):
    """The operator of one cell.

    It is `op(u, *extras, w, h0, mask, starts, backend) -> (y, h_T, history, a)`, and for tied weights
    `op(x, *extras, w, b, h0, mask, starts, "cuda") -> (y, h_T, history, a, sums)`. Only the backward reads history (T+1, B, d),
    the states; a (T, B, d) or empty; and sums (T+1, B, d), the s_t. Verification calls the cell's `DenseKernel`, `kernel`.
    """

    def __init__(self, cell: DenseCell, kernel: Callable[..., tuple[Tensor, Tensor]]) -> None:
        self.cell, self.name, self.tied, self._kernel = cell, cell.name, cell.bare is not None, kernel
        self.cpu = not self.tied
        self.operator = Operator(family_of(cell), cell, native.run, portable.PLAIN, portable.gradients)
        self.op = self.operator.op
        register(self)

    def prepare(self, dtype: torch.dtype, rows: int, width: int, slots: int = 1, packed: bool = False) -> str | None:
        """As `dispatch.Compiled`; None for tied weights if no persistent launch holds W."""
        index = torch.cuda.current_device()
        chosen = native.plan_for(self.cell, rows, width, dtype, index, slots, packed)
        if chosen.kind == "steps" and self.tied:
            return None
        native.ready(self.cell, rows, width, dtype, index, slots, packed)
        return str(chosen)

    def builds(
        self, arch: str, dtype: torch.dtype, _rows: int, width: int, slots: int = 1, packed: bool = False
    ) -> Sequence[Extension]:
        return native.builds(self.cell, "cuda", arch, [width], [dtype], slots, packed)

    def cases(self, dtype: torch.dtype, rows: int, width: int, slots: int = 1, packed: bool = False) -> Sequence[Case]:
        sizes = (first_steps(rows, width), rows, width, *([slots] if self.cell.blocks else []))
        return [Case.of("TBdS"[: len(sizes)], sizes, dtype, packed=packed)]

    def spec(self) -> KernelSpec:
        cell, count = self.cell, len(self.cell.extras)

        def call(backend: str, inputs: Inputs, _options: Mapping[str, Any]) -> Outputs:
            first, *rest = inputs.values()
            projection: dict[str, Any] = {}
            if self.tied:
                w = rest[count]
                b = rest.pop(count + 1)
                if backend == "reference":
                    x, wide_w, wide_b = (x.to(compute_dtype(first)) for x in (first, w, b))
                    first = F.linear(F.silu(x), wide_w, wide_b).to(first.dtype)
                else:
                    projection = {"v": w, "b": b, "silu": True}
            y, last = self._kernel(first, *rest, backend=backend, **projection)
            return {"y": y, "h_T": last}

        def op(backend: str, inputs: Inputs, options: Mapping[str, Any]) -> Any:
            return None if self.tied and backend != "cuda" else self.operator.example(backend, inputs, options)

        return self.operator.spec(
            self._kernel,
            ("y", "h_T"),
            call=call,
            op=op,
            extension=lambda target: native.source(cell, target),
            targets=tuple(t for t in build.targets() if t == "cuda" or not self.tied),
            portable=("torch",),
            emulated=BLOCK_EMULATED if cell.blocks else EMULATED,
            module=lambda target, case: native.module_for(cell, target, case),
            builds=lambda target, arch, widths, dtypes: native.builds(cell, target, arch, widths, dtypes),
            visible=lambda inputs: {"y": mask[..., None]} if (mask := inputs["mask"]) is not None else {},
            after=native.check_errors,
            python=native.steps_sources(cell),
        )
