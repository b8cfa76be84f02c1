"""The recurrence: the one place that chooses an implementation. T time, B batch, d inner width."""

from __future__ import annotations

from pathlib import Path

import torch.nn.functional as F
from torch import Tensor

from elman_core.kernels import DenseKernel, Step, Tied
from elman_core.nn import self_gate

from .reference import e42_reference

dense = DenseKernel(
    "e42",
    header=Path(__file__).parent / "csrc" / "e42_cell.h",
    cell="elman::e42::Cell",
    reference=e42_reference,
    readout=lambda h, _h: self_gate(h),
)

one_step = Step(dense)
tied = Tied(dense, silu=True)


def e42(u_TBd: Tensor, w_dd: Tensor, h0_Bd: Tensor, mask_TB: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As `e42_reference`, on the fastest back end that this device has."""
    return dense(u_TBd, w_dd, h0_Bd, mask_TB)


def e42_projected(
    x_TBd: Tensor, w_dd: Tensor, b_d: Tensor, h0_Bd: Tensor, mask_TB: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same with u = W x + b; in one launch, which reads W once, where decoding takes a single step."""
    if one_step.takes(x_TBd, w_dd, mask_TB):
        return one_step(x_TBd, w_dd, b_d, w_dd, h0_Bd)
    return e42(F.linear(x_TBd, w_dd, b_d), w_dd, h0_Bd, mask_TB)


def e42_silu_projected(
    u_TBd: Tensor, w_dd: Tensor, b_d: Tensor, h0_Bd: Tensor, mask_TB: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """That of x = silu(u): W (h + silu(u)) + b is one product a step, so a GPU needs no projection before the loop."""
    if one_step.takes(u_TBd, w_dd, mask_TB):
        return one_step(F.silu(u_TBd), w_dd, b_d, w_dd, h0_Bd)
    return tied(u_TBd, w_dd, b_d, h0_Bd, mask_TB)
