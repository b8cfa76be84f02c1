"""`DenseKernel`: one object turns a dense cell into a differentiable op that runs anywhere.

The op is the recurrence over all time steps

    a_t = W h_{t-1} + u_t,   (h_t, y_t) = cell(a_t, h_{t-1}, e_t)

It is the operator `elman::dense_NAME`, with its backward. Every `Backend` computes it; on a CPU, "auto" runs a kernel in
training alone.

A call with the projection in front of the recurrence may run both in one launch on a GPU: a single step without gradients
(`decode/step.py`) or, if W itself is the projection, all steps (`recurrence.py`). The kernel decides that by itself.

Shapes: T time, B batch, d width, K inputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from elman_core.kernels import runtime
from elman_core.kernels.decode.step import MOST_EXTRAS, Step
from elman_core.kernels.dispatch import FEW, choose, in_words, launches, runs, trains
from elman_core.kernels.spec import Backend, Inputs, KernelSpec, limit
from elman_core.registry.errors import ConfigError

from . import native
from .recurrence import Recurrence
from .spec import CUDA_DTYPES, TIED, DenseCell


class DenseKernel:
    """The op of one dense cell. Make one at module level and call it.

    Args:
        name: of the variant; lower case.
        header: the cell header, as in `elman/dense_cell.h` of `elman_csrc`.
        reference: `reference(u, *extras, w, h0, mask, starts) -> (y, h_T)`.
        readout: `readout(h, h_prev, *extras) -> y` in PyTorch, pointwise, for any number of leading dimensions.
        update: `update(a, h_prev, *extras) -> h` likewise; None for h = a.
        extras: names of the tensors (T, B, d) that the cell reads beside u.
        uses_a: whether the cell's backward reads a; as in the header.
        tied: whether W projects the input too, u = W silu(x) + b. A second kernel then does all of it in one launch.
        blocks: whether W is block-diagonal, given as its S blocks (S, d / S, d / S): independent slots in one launch.
        accumulates: for a state that keeps everything, the extra (logits of a gate) that scales what a step adds to it.
            Verification then draws logits near -log T: rounding would decide the gradient of a state that grows with T.
        cell: the C++ name of the cell; "elman::NAME::Cell" unless given. adjust: as in `Cell`.
    """

    def __init__(
        self,
        name: str,
        *,
        header: Path,
        reference: Callable[..., tuple[Tensor, Tensor]],
        readout: Callable[..., Tensor],
        update: Callable[..., Tensor] | None = None,
        extras: Sequence[str] = (),
        uses_a: bool = False,
        tied: bool = False,
        blocks: bool = False,
        accumulates: str | None = None,
        adjust: Callable[[Inputs, Mapping[str, Any]], None] | None = None,
        cell: str | None = None,
    ) -> None:
        limit(name, extras=(extras, 0, 4))
        for what, made in (("readout", readout), ("update", update)):
            try:
                _ = inspect.isfunction(made) and inspect.signature(made).bind("h", "h_prev", *extras)
            except TypeError as error:
                raise ConfigError(f"{name}: {what}({', '.join(('h', 'h_prev', *extras))}): {error}") from error
        self.name = name
        self.cell = DenseCell(
            name, Path(header), cell or f"elman::{name}::Cell", reference, adjust,
            readout=readout, update=update, extras=tuple(extras), uses_a=uses_a, accumulates=accumulates, blocks=blocks,
        )  # fmt: skip
        wanted = TIED.wanted(self.cell)
        self._wanted = {"u": wanted.pop("x"), **wanted} | ({"w": runtime.Wanted("Snn", "computed")} if blocks else {})
        self._plain = Recurrence(self.cell, self)
        tied_cell = replace(self.cell, name=f"{name}_tied_silu", bare=self.cell)
        self._tied = Recurrence(tied_cell, self) if tied else None
        self._step = Step(self.cell, self) if len(self.cell.extras) <= MOST_EXTRAS and not blocks else None
        self.op = self._plain.op

    def __call__(
        self,
        x_TBK: Tensor,
        *rest: Tensor | None,
        v: Tensor | None = None,
        b: Tensor | None = None,
        silu: bool = False,
        backend: Backend = "auto",
    ) -> tuple[Tensor, Tensor]:
        """`kernel(u, *extras, w, h0, mask=None, starts=None) -> (y, h_T)`; `kernel(x, …, v=V, b=b)` for u = x Vᵀ + b.

        Args:
            x_TBK: u (without b), or with v the input of its projection; float32, bfloat16, float16 or float64; any strides.
            extras: (T, B, d) each, in the dtype of u.
            w_dd: W, rows are outputs; in the dtype of u or in float32.
            h0_Bd: initial state.
            mask_TB: bool; where False the state is held, y is 0, and gradients flow back only through the state.
            starts_TB: bool; where True the state is set to 0 before the step, masked or not.
            v: (d, K); may be W itself. b: (d,).
            silu: whether x passes SiLU first.
            backend: as `Backend` in kernels/spec.py says, with what a call raises.

        Returns:
            y (T, B, d) in the dtype of u, and h_T (B, d) in float32 (float64 for float64).
        """
        count = len(self.cell.extras)
        extras = list(rest[:count])
        others = rest[count:]
        if not 2 <= len(others) <= 4:
            expected = ", ".join(("u", *self.cell.extras, "w", "h0", "mask=None", "starts=None"))
            raise ConfigError(f"{self.name} takes ({expected}), not {1 + len(rest)} tensors")
        w_dd, h0_Bd, mask_TB, starts_TB = (*others, None, None)[:4]
        recurrence = self._plain
        u_TBd = x_TBK
        if w_dd is not None and h0_Bd is not None:
            if backend == "auto" and self._step is not None and self._step.takes(x_TBK, v, w_dd, mask_TB, starts_TB):
                return self._step(F.silu(x_TBK) if silu else x_TBK, v, b, *extras, w_dd, h0_Bd)
            if v is w_dd and b is not None and silu and self._tied is not None:
                narrow_TBd = x_TBK.to(runtime.autocast_dtype(x_TBK))
                if self._is_tied(self._tied, narrow_TBd, backend, starts_TB is not None):
                    recurrence = self._tied
                    u_TBd = narrow_TBd
                    backend = "cuda" if backend == "auto" else backend
        if recurrence is self._plain:
            u_TBd = F.silu(u_TBd) if silu else u_TBd
            if v is not None:
                u_TBd = runtime.invariant_linear(u_TBd, v, None if b is None else b.to(v.dtype))
            elif b is not None:
                u_TBd = u_TBd + b.to(u_TBd.dtype)
            b = None
        sizes = runtime.check(recurrence.name, self._wanted, (u_TBd, *extras, w_dd, b, h0_Bd, mask_TB, starts_TB))
        slots = sizes.get("S", 1)
        if self.cell.blocks and slots * sizes["n"] != sizes["d"]:
            raise ConfigError(
                f"{self.name}: w must be ({slots}, d, d) with d = {sizes['d']} / {slots}, not {sizes['n']}"
            )
        rows = u_TBd.shape[1]
        spare = runtime.spare_rows(rows, u_TBd) if backend == "auto" else 0
        if spare:
            u_TBd, mask_TB, starts_TB, *extras = runtime.with_spare(spare, 1, u_TBd, mask_TB, starts_TB, *extras)
            (h0_Bd,) = runtime.with_spare(spare, 0, h0_Bd)
        T, B, d = u_TBd.shape
        cpu = trains(u_TBd, T, d)

        def problem() -> tuple[int, int, int, bool]:
            return int(FEW if cpu else B), int(d), int(slots), starts_TB is not None and not cpu

        backend = choose(self.name, backend, u_TBd, problem, cpu=cpu)
        if backend == "reference":
            return self.cell.reference(u_TBd, *extras, w_dd, h0_Bd, mask_TB, starts_TB)
        weights = (w_dd,) if recurrence is self._plain else (w_dd, b)
        y_TBd, last_Bd = recurrence.operator.call(u_TBd, *extras, *weights, h0_Bd, mask_TB, starts_TB, backend=backend)
        return (y_TBd[:, :rows], last_Bd[:rows]) if spare else (y_TBd, last_Bd)

    def _is_tied(self, tied: Recurrence, x_TBd: Tensor, backend: Backend, packed: bool = False) -> bool:
        """Whether one launch does everything. With "auto", compiles and verifies it at the first use of a size."""
        if x_TBd.dim() != 3 or x_TBd.dtype not in CUDA_DTYPES or not (launches(x_TBd) or backend == "emulated"):
            return False
        rows, width = map(int, x_TBd.shape[1:])
        if backend == "auto" and not runtime.transformed():
            return runs(tied.name, x_TBd, rows, width, 1, packed)
        if backend not in ("cuda", "emulated"):
            return False
        runtime.refuse_transforms(tied.name)
        return native.plan_for(tied.cell, rows, width, x_TBd.dtype, x_TBd.device.index, 1, packed).kind != "steps"

    def spec(self) -> KernelSpec:
        """What `elman verify` checks of the recurrence itself."""
        return self._plain.spec()

    def specs(self) -> tuple[KernelSpec, ...]:
        """All that `elman verify` checks: give it as `Variant(kernels=….specs())`."""
        return tuple(one.spec() for one in (self._plain, self._tied, self._step) if one is not None)

    def backend(self, device: torch.device | str, width: int) -> str:
        """What "auto" runs at this width, in words. Compiles nothing: before the first use, it says what will be tried."""
        names = [one.name for one in (self._tied, self._plain) if one is not None]
        said = [in_words(name, device, "torch", lambda _rows, d, *_: d == width) for name in names]
        return "cuda" if "cuda" in said else said[-1]
