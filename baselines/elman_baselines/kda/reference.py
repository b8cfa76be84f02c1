"""One step of the delta rule with a decay for each channel."""

from __future__ import annotations

from torch import Tensor

from elman_core.nn import matrix_reference


@matrix_reference
def delta_reference(s: Tensor, k: Tensor, decay: Tensor, erase: Tensor, v: Tensor) -> Tensor:
    return decay * s + k * (v - (k * erase).mT @ s)
