"""The recurrence: the one place that chooses an implementation. T time, B batch, d inner width."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from elman_core.kernels import DenseKernel
from elman_core.nn import self_gate

from .reference import e42_reference

dense = DenseKernel(
    "e42",
    header=Path(__file__).parent / "csrc" / "e42_cell.h",
    cell="elman::e42::Cell",
    reference=e42_reference,
    readout=lambda h, _h: self_gate(h),
)


def e42(u_TBd: Tensor, w_dd: Tensor, h0_Bd: Tensor, mask_TB: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As `e42_reference`, on the fastest back end that this device has."""
    return dense(u_TBd, w_dd, h0_Bd, mask_TB)
