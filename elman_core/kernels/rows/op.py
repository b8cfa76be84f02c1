"""`RowsKernel`: a matrix state whose rows share one matrix, with one kernel in each direction.

    S_t = f_t S_{t-1} + (1 - f_t) tanh(S_{t-1} W + k_t v_tᵀ),   o_t = S_tᵀ q_t

for every head, registered with `torch.library` as `elman::rows_NAME` and its backward. On NVIDIA GPUs, in 16-bit storage, the
kernels of `elman_csrc` (rows.cuh) run, compiled for each dtype, K and V at first use; on a CPU, where that pays, those of
rows_cpu.h, in float32 and bfloat16; elsewhere the reference.

Shapes: B batch, T time, H heads, G = H or 1 heads of q and k, K rows (keys), V columns (values).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elman_core.kernels import build
from elman_core.kernels.dispatch import Compiled, choose, in_words, pays, register
from elman_core.kernels.family import Values
from elman_core.kernels.operators import Operator
from elman_core.kernels.runtime import check, compute_dtype
from elman_core.kernels.spec import Backend, Case, Cell, Inputs, KernelSpec
from elman_core.registry.errors import ConfigError

from . import native
from .spec import DTYPES, EMULATED, FAMILY, case


class RowsKernel(Compiled):
    """The op of one variant. Make one at module level and call it.

    Args:
        name, adjust: as in `Cell`. reference: `reference(q, k, v, f, w, state, mask, starts) -> (o, S_T)`, the truth.
    """

    cpu = True

    def __init__(
        self,
        name: str,
        *,
        reference: Callable[..., tuple[Tensor, Tensor]],
        adjust: Callable[[Inputs, Mapping[str, Any]], None] | None = None,
    ) -> None:
        self.name, self.reference = name, reference
        self.cell = Cell(name, Path(), "", reference, adjust=adjust)
        self._wanted = FAMILY.wanted(self.cell)
        self._operator = Operator(FAMILY, self.cell, native.run, (), _gradients)
        self.op = self._operator.op
        register(self)

    def __call__(
        self, q_BTGK: Tensor, k_BTGK: Tensor, v_BTHV: Tensor, f_BTH: Tensor, w_HVV: Tensor,
        state_BHKV: Tensor | None = None, mask_BT: Tensor | None = None, starts_BT: Tensor | None = None,
        backend: Backend = "auto",
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The recurrence over all time steps.

        Args:
            q_BTGK, k_BTGK, v_BTHV: float32, bfloat16, float16 or float64, of one dtype; any strides.
            f_BTH: from 0 to 1. w_HVV: W; a kernel reads it in the dtype of q. Both in any floating dtype.
            state_BHKV: S_0; None is zeros. mask_BT: bool; where False the state is held and o is arbitrary.
            starts_BT: bool; where True the state is set to 0 before the step, masked or not.
            backend: "auto", "cuda", "cpu" or "reference", as `Backend` in kernels/spec.py says, with what a call raises.

        Returns:
            o (B, T, H, V) in the dtype of q, S_T (B, H, K, V) in float32 (float64 for float64).
        """
        given = (q_BTGK, k_BTGK, v_BTHV, f_BTH, w_HVV, state_BHKV, mask_BT, starts_BT)
        sizes = check(self.name, self._wanted, given)
        T, G, H, K, V = (sizes[letter] for letter in "TGHKV")
        if G not in (1, H):
            raise ConfigError(f"{self.name}: q and k have {G} heads beside v with {H}; give as many, or one")
        wide = compute_dtype(q_BTGK)
        asked: Backend = "reference" if backend == "auto" and wide == torch.float64 else backend
        cpu = pays(q_BTGK, T, H * K * V)
        chosen = choose(self.name, asked, q_BTGK, lambda: (K, V), "reference", cpu=cpu)
        if chosen == "reference":
            return self.reference(*given)
        o, last = self._operator.call(*given, backend=chosen)
        return o, last

    def spec(self) -> KernelSpec:
        return self._operator.spec(
            self,
            ("o", "S"),
            extension=lambda target: native.extension(self.name, torch.bfloat16, 16, 16, target),
            builds=lambda target, _arch, rows, dtypes: [
                native.extension(self.name, dtype, K, 16, target)
                for dtype in dtypes or DTYPES[:1]
                for K in rows or (16, 64)
            ],
            module=lambda target, c: native.extension(self.name, c.dtype, c.sizes["K"], c.sizes["V"], target),
            targets=("cuda", "cpu") if build.targets() else (),
            emulated=EMULATED,
            visible=lambda inputs: {"o": mask[..., None, None]} if (mask := inputs["mask"]) is not None else {},
        )

    def backend(self, device: torch.device | str, rows: int, columns: int) -> str:
        """What "auto" runs at this size, in words. Compiles nothing: before the first use, it says what will be tried."""
        return in_words(self.name, device, "reference", lambda *size: size == (rows, columns))

    def prepare(self, dtype: torch.dtype, rows: int, columns: int) -> str:
        native.module(self.name, dtype, rows, columns, "cuda", torch.cuda.current_device())
        return "a block for each head and row of the batch, a warp for 16 rows of the state"

    def cases(self, dtype: torch.dtype, rows: int, columns: int) -> Sequence[Case]:
        return [case((2, 49, 3, rows, columns), dtype, masked=True, packed=True)]


def _gradients(_cell: Cell, values: Values) -> Values:
    """The gradients of the inputs: the shares of heads, of rows of the batch and of the state are added up."""
    q, k = (x if values["q"].shape == x.shape else x.sum(2, keepdim=True) for x in (values["dq"], values["dk"]))
    found = {"q": q, "k": k, "v": values["dv"], "f": values["df"], "w": values["dw"].sum((0, 2)).to(values["w"].dtype)}
    if values["needs"]["S0"]:
        found["S0"] = values["ds0"]
    return found
