"""`GatesKernel`: one object turns a gated cell into a differentiable op that runs anywhere.

    p_t = W h_{t-1} + b,   (h_t, s_t) = step(p_t, u_t, h_{t-1}, s_{t-1}),   y_t = h_t

p and u have k parts of d channels, the gates: a step has k products of the same h. s is up to three further states. With H
heads, W is block-diagonal: each head is such a recurrence of d / H channels, whose gates lie behind those of the head before.
It is the operator `elman::gates_NAME`, with its backward. Every `Backend` computes it; on a CPU, "auto" runs a kernel in
training alone. On a GPU, one persistent launch: sm_90 and newer, 16-bit storage, d (or d / H) a multiple of 64 up to 1024.

Shapes: T time, B batch, d width, G = k d, c = d / H.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elman_core.kernels.build import Extension, Target
from elman_core.kernels.dense.native import check_errors
from elman_core.kernels.dispatch import FEW, Compiled, choose, in_words, launches, register, runs, trains
from elman_core.kernels.operators import Operator
from elman_core.kernels.runtime import CPU_DTYPES, check, spare_rows, with_spare
from elman_core.kernels.spec import Backend, Case, Inputs, KernelSpec, first_steps, limit
from elman_core.registry.errors import ConfigError

from . import native, portable
from .spec import EMULATED, EMULATED_HEADS, FAMILY, GatesCell

_WIDTHS = (512, 768, 1024)  # for which `elman build` compiles


class GatesKernel(Compiled):
    """The op of one gated cell. Make one at module level and call it.

    Args:
        name: of the kernel; lower case.
        header: the cell header, as in `elman/gates_cell.h` of `elman_csrc`.
        step: `step(p, u, *states) -> new states` in PyTorch, pointwise, for any number of leading dimensions; p and u are
            tuples of `gates` tensors, and the first state is h.
        gates: k. kept: how many numbers the C++ cell keeps for the backward. splits: whether its du differs from dp.
        inner: of a staged cell, `inner(p, u, h)` in PyTorch: what the last product is of, in place of h. It reads the first
            k - 1 of p. Such a cell has no back end torch and no heads.
        states: names of the states: h and at most three more.
        cell: the C++ name of the cell; "elman::NAME::Cell" unless given. adjust: as in `Cell`.
    """

    cpu = True
    plain: Backend

    def __init__(
        self,
        name: str,
        *,
        header: Path,
        step: portable.Step,
        gates: int,
        kept: int,
        splits: bool = False,
        inner: Callable[..., Tensor] | None = None,
        states: Sequence[str] = ("h",),
        adjust: Callable[[Inputs, Mapping[str, Any]], None] | None = None,
        cell: str | None = None,
    ) -> None:
        limit(name, states=(states, 1, 4), gates=(gates, 1, 4))
        if inner is not None and (splits or len(states) > 1):
            raise ConfigError(f"{name}: a cell with `inner` has one state, du = dp: leave out splits and more states")
        self.name, self.plain = name, ("torch" if inner is None else "reference")
        self.cell = GatesCell(
            name, Path(header), cell or f"elman::{name}::Cell", step, adjust=adjust,
            gates=gates, kept=kept, splits=splits, inner=inner, states=tuple(states),
        )  # fmt: skip
        self._wanted = FAMILY.wanted(self.cell)
        self._operator = Operator(FAMILY, self.cell, native.run, portable.PLAIN, portable.gradients)
        self.op = self._operator.op
        register(self)

    def __call__(
        self,
        u_TBG: Tensor,
        w_Gc: Tensor,
        b_G: Tensor | None,
        *states: Tensor,
        mask: Tensor | None = None,
        starts: Tensor | None = None,
        backend: Backend = "auto",
    ) -> tuple[Tensor, ...]:
        """The recurrence over all time steps.

        Args:
            u_TBG: everything that does not depend on the state; float32, bfloat16, float16 or float64; any strides.
            w_Gc: W, gate below gate; with heads, head below head. b_G: the bias of the products, if any.
            states: the states before the first step, (B, d) each.
            mask: (T, B), bool; where False the states are held, y is 0, and gradients flow back only through the states.
            starts: (T, B), bool; where True the states are set to 0 before the step, masked or not.
            backend: as `Backend` in kernels/spec.py says, with what a call raises.

        Returns:
            y (T, B, d) in the dtype of u, and the states (B, d) in float32 (float64 for float64).
        """
        d = next((h.shape[-1] for h in states if isinstance(h, Tensor)), w_Gc.shape[-1])
        heads = max(1, d // w_Gc.shape[-1]) if self.cell.inner is None else 1
        given = (u_TBG, w_Gc, b_G, *states, mask, starts)
        check(self.name, self._wanted, given, {"d": d, "G": self.cell.gates * d, "c": d // heads})
        rows = u_TBG.shape[1]
        spare = spare_rows(rows, u_TBG) if backend == "auto" else 0
        if spare:
            u_TBG, mask, starts = with_spare(spare, 1, u_TBG, mask, starts)
            given = (u_TBG, w_Gc, b_G, *with_spare(spare, 0, *states), mask, starts)
        cpu = trains(u_TBG, len(u_TBG), d)
        packed = starts is not None
        backend = choose(self.name, backend, u_TBG, lambda: _problem(u_TBG, d, packed, heads, cpu), self.plain, cpu=cpu)
        y_TBd, last_SBd = self._operator.call(*given, backend=backend)
        if spare:
            y_TBd, last_SBd = y_TBd[:, :rows], last_SBd[:, :rows]
        return y_TBd, *last_SBd.unbind(0)

    @staticmethod
    def supports(device: torch.device, dtype: torch.dtype, width: int, heads: int = 1) -> bool:
        """Whether there are kernels for this device, dtype, width and number of heads."""
        if device.type == "cpu":
            return dtype in CPU_DTYPES
        sizes = dtype in native.DTYPES and width % (native.STEP * heads) == 0 and width <= native.WIDEST * heads
        return sizes and (device.type == "meta" or (device.type == "cuda" and native.is_capable(device.index)))

    def takes(self, like: Tensor, width: int, packed: bool = False, heads: int = 1) -> bool:
        """Whether a kernel runs rows of `like` (T, B, …) at this width; packed: with starts of documents. Compiles and verifies
        it at the first use of a size."""
        cpu = trains(like, len(like), width)
        return (cpu or launches(like)) and runs(self.name, like, *_problem(like, width, packed, heads, cpu), cpu=cpu)

    def spec(self) -> KernelSpec:
        return self._operator.spec(
            lambda *inputs, backend: self(*inputs[:-2], mask=inputs[-2], starts=inputs[-1], backend=backend),
            ("y", *(f"{name}_T" for name in self.cell.states)),
            extension=lambda target: native.extension(self.cell, target),
            module=lambda target, case: native.module_for(self.cell, target, case),
            builds=lambda target, _arch, widths, dtypes: self._builds(target, widths, dtypes),
            portable=("torch",) if self.cell.inner is None else (),
            emulated=EMULATED if self.cell.inner is not None else EMULATED + EMULATED_HEADS,
            after=check_errors,
        )

    def backend(self, device: torch.device | str, width: int, plain: str = "") -> str:
        """What "auto" runs at this width, in words. Compiles nothing: before the first use, it says what will be tried."""
        return in_words(self.name, device, plain or self.plain, lambda _rows, d, *_: d == width)

    def prepare(self, dtype: torch.dtype, rows: int, width: int, packed: bool = False, heads: int = 1) -> str:
        _, each, groups = native.settled(self.cell, dtype, rows, width, torch.cuda.current_device(), packed, heads)
        return f"{groups} groups of {width // native.OWNED} blocks, {each} rows each"

    def builds(
        self, _arch: str, dtype: torch.dtype, _rows: int, width: int, packed: bool = False, heads: int = 1
    ) -> Sequence[Extension]:
        return self._builds("cuda", [width], [dtype], packed, heads)

    def _builds(
        self, target: Target, widths: Sequence[int], dtypes: Sequence[torch.dtype], packed: bool = False, heads: int = 1
    ) -> list[Extension]:
        if target != "cuda":
            return [native.extension(self.cell, target, dtype) for dtype in dtypes or CPU_DTYPES[:1]]
        return [
            native.extension(self.cell, target, dtype, width, rows, packed, heads)
            for dtype in dtypes or (torch.bfloat16,)
            for width in widths or _WIDTHS
            for rows in (8, 16)
        ]

    def cases(self, dtype: torch.dtype, rows: int, width: int, packed: bool = False, heads: int = 1) -> Sequence[Case]:
        steps = first_steps(rows, width)
        if heads > 1:
            return [Case.of("TBHd", (steps, rows, heads, width), dtype, packed=packed)]
        return [Case.of("TBd", (steps, rows, width), dtype, packed=packed)]


def _problem(like: Tensor, width: int, packed: bool, heads: int, cpu: bool) -> tuple[Any, ...]:
    """What is settled and verified once. Sizes become numbers: a compiled function is compiled again for another batch."""
    problem = (FEW, int(width), False) if cpu else (int(like.shape[1]), int(width), packed)
    return (*problem, int(heads)) if heads > 1 else problem
