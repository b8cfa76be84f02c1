"""`Step`: one time step of a matrix state without gradients, in a kernel that reads the state once. Shapes as in op.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from elman_core.kernels.decode.native import alone
from elman_core.kernels.dispatch import Compiled, register, runs
from elman_core.kernels.spec import Case, KernelSpec

from . import native, problems
from .spec import Form, MatrixCell, Size

_ENOUGH = 3 * 160
"""Blocks of 32 columns that are many for every GPU (`elman_matrix_forward` of `bind/matrix_step_cuda.cu`)."""


class Step(Compiled):
    """What "auto" runs in place of the kernel of all steps where there is one. spec: makes its spec."""

    def __init__(self, cell: MatrixCell, spec: Callable[[], KernelSpec]) -> None:
        self.cell, self.name, self._spec = cell, f"{cell.name}_step", spec
        register(self)

    def spec(self) -> KernelSpec:
        return self._spec()

    def takes(self, like: Tensor, problem: Callable[[], tuple[int, int, str]]) -> bool:
        """Whether a call runs here. Compiles and verifies it at the first use of a size. like: (B, T, …), the first input.
        problem: makes N, V and the form without starts of documents."""
        return alone(like) and like.shape[1] == 1 and runs(self.name, like, *problem())

    def prepare(self, dtype: torch.dtype, rows: int, columns: int, form: str) -> str:
        native.load(self.cell, "cuda", Size(rows, columns, dtype, form, step=True), torch.cuda.current_device())
        return "one launch"

    def cases(self, dtype: torch.dtype, rows: int, columns: int, form: str) -> Sequence[Case]:
        """As few blocks as there can be, and many."""
        maps, on = self.cell.read(form)
        wide, many = Form.parse(form).wide, -(-_ENOUGH // -(-columns // 32))
        return [
            problems.case((1, 1, 1, rows, columns), dtype, maps=maps, on=on, wide=wide),
            problems.case((many, 1, 1, rows, columns), dtype, maps=maps, on=on, wide=wide, masked=True, packed=True),
        ]
