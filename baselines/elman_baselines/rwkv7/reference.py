"""One step of RWKV-7's state."""

from __future__ import annotations

from torch import Tensor

from elman_core.nn import matrix_reference


@matrix_reference
def dplr_reference(s: Tensor, k: Tensor, decay: Tensor, read: Tensor, again: Tensor, v: Tensor) -> Tensor:
    return decay * s + k * v + again * (read.mT @ s)
