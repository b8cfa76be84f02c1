"""The recurrence: the one place that chooses an implementation. T time, B batch, d inner width."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from elman_core.kernels import DenseKernel, Step

from .reference import e1_reference

dense = DenseKernel(
    "e1",
    header=Path(__file__).parent / "csrc" / "e1_cell.h",
    cell="elman::e1::Cell",
    reference=e1_reference,
    update=lambda a, _h, _z: torch.tanh(a),
    readout=lambda h, _h, z: h * F.silu(z),
    extras=("z",),
)
one_step = Step(dense)


def e1(
    u_TBd: Tensor, z_TBd: Tensor, w_dd: Tensor, h0_Bd: Tensor, mask_TB: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As `e1_reference`, on the fastest back end that this device has."""
    return dense(u_TBd, z_TBd, w_dd, h0_Bd, mask_TB)
