"""`ElementwiseKernel`: one object turns an elementwise cell into a differentiable op that runs anywhere.

The op is the recurrence over all time steps, in which channels and rows are independent:

    (h_t, y_t) = cell(h_{t-1}, x_t, p)        h: one state or more, x: streams (T, B, d), p: learned vectors (d,)

It is the operator `elman::elementwise_NAME`, with its backward. Every `Backend` computes it; on a CPU, "auto" runs a kernel in
training alone. On a GPU the forward keeps the states of every 16th step, and the backward computes the others again; a single
step without gradients, as in decoding, has its own launch.

Shapes: T time, B batch, d width, S states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elman_core.kernels.dispatch import FEW, Compiled, choose, in_words, register, trains
from elman_core.kernels.operators import Operator
from elman_core.kernels.runtime import check
from elman_core.kernels.spec import Backend, Case, Inputs, KernelSpec, first_steps, limit
from elman_core.registry.errors import ConfigError

from . import native, portable
from .spec import EMULATED, FAMILY, ElementwiseCell


class ElementwiseKernel(Compiled):
    """The op of one elementwise cell. Make one at module level and call it.

    Args:
        name: of the variant; lower case.
        header: the cell header, as in `elman/elementwise_cell.h` of `elman_csrc`.
        step: `step(*states, *streams, *vectors) -> (*new states, y)` in PyTorch, pointwise, for any number of leading
            dimensions: the recurrence on a CPU, and the truth.
        streams: names of the tensors (T, B, d) that the cell reads, at most 6.
        vectors: names of its learned vectors (d,), at most 8.
        states: names of its states, at most 4.
        cell: the C++ name of the cell; "elman::NAME::Cell" unless given. adjust: as in `Cell`.
    """

    cpu = True

    def __init__(
        self,
        name: str,
        *,
        header: Path,
        step: portable.Step,
        streams: Sequence[str],
        vectors: Sequence[str] = (),
        states: Sequence[str] = ("h",),
        cell: str | None = None,
        adjust: Callable[[Inputs, Mapping[str, Any]], None] | None = None,
    ) -> None:
        limit(name, streams=(streams, 1, 6), vectors=(vectors, 0, 8), states=(states, 1, 4))
        self.name = name
        self.cell = ElementwiseCell(
            name, Path(header), cell or f"elman::{name}::Cell", step, adjust=adjust,
            streams=tuple(streams), vectors=tuple(vectors), states=tuple(states),
        )  # fmt: skip
        self._wanted = FAMILY.wanted(self.cell)
        self._least = sum(not each.optional for each in self._wanted.values())
        self._operator = Operator(FAMILY, self.cell, native.run, portable.PLAIN, portable.gradients)
        self.op = self._operator.op
        register(self)

    def __call__(self, *given: Tensor | None, backend: Backend = "auto") -> tuple[Tensor, ...]:
        """`kernel(*streams, *vectors, *states, mask, starts) -> (y, *final states)`, all by position; the last two may be None.

        Args:
            streams: (T, B, d) each, float32, bfloat16, float16 or float64; any strides.
            vectors: (d,) each. states: the states before the first step, (B, d) each. Both in any floating dtype.
            mask: (T, B), bool; where False the states are held, y is 0, and gradients flow back only through the states.
            starts: (T, B), bool; where True the states are set to 0 before the step, masked or not.
            backend: as `Backend` in kernels/spec.py says, with what a call raises.

        Returns:
            y (T, B, d) in the dtype of the streams, and the states (B, d) in float32 (float64 for float64).
        """
        if not self._least <= len(given) <= len(self._wanted):
            names = (f"{name}{'=None' * each.optional}" for name, each in self._wanted.items())
            raise ConfigError(f"{self.name} takes ({', '.join(names)}), not {len(given)} tensors")
        given += (None,) * (len(self._wanted) - len(given))
        check(self.name, self._wanted, given)
        first: Any = given[0]
        T, B, d = first.shape
        cpu = trains(first, T, d)
        backend = choose(self.name, backend, first, lambda: map(int, (FEW if cpu else B, d)), cpu=cpu)
        y_TBd, last_SBd = self._operator.call(*given, backend=backend)
        return y_TBd, *last_SBd.unbind(0)

    def spec(self) -> KernelSpec:
        return self._operator.spec(
            self,
            ("y", *(f"{name}_T" for name in self.cell.states)),
            extension=lambda target: native.extension(self.cell, target),
            module=lambda target, case: native.extension(self.cell, target, case.dtype),
            builds=lambda target, _arch, _widths, dtypes: [
                native.extension(self.cell, target, dtype) for dtype in dtypes or (torch.bfloat16,)
            ],
            portable=("torch",),
            emulated=EMULATED,
        )

    def backend(self, device: torch.device | str, width: int) -> str:
        """What "auto" runs at this width, in words. Compiles nothing: before the first use, it says what will be tried."""
        return in_words(self.name, device, "torch", lambda _rows, d: d == width)

    def prepare(self, dtype: torch.dtype, _rows: int, _width: int) -> str:
        native.module(self.cell, "cuda", dtype, torch.cuda.current_device())
        return "a lane for each channel"

    def cases(self, dtype: torch.dtype, rows: int, width: int) -> Sequence[Case]:
        return [Case.of("TBd", (first_steps(rows, width), rows, width), dtype)]
