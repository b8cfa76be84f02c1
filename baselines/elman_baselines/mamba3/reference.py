"""One step of Mamba-3's state and of its angles."""

from __future__ import annotations

from torch import Tensor

from elman_core.nn import matrix_reference


@matrix_reference
def trapezoid_reference(
    s: Tensor, k: Tensor, k_past: Tensor, v: Tensor, v_past: Tensor, decay: Tensor, gain: Tensor, gain_past: Tensor
) -> Tensor:
    return decay * s + gain * k * v + gain_past * k_past * v_past


def angle_step(angle: Tensor, turn: Tensor) -> tuple[Tensor, Tensor]:
    angle = angle + turn
    return angle, angle.clone()
