"""The recurrences of E68 on every back end."""

from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from elman_core.kernels import ElementwiseKernel

from .reference import step, step_i

PARTS: dict[str, Any] = {
    "header": Path(__file__).parent / "csrc" / "e68_cell.h",
    "streams": ("a", "k"),
    "vectors": ("delta", "b_g"),
}
e68 = ElementwiseKernel("e68", cell="elman::e68::Cell<false>", step=step, **PARTS)


def _keep_signs(inputs: dict[str, Tensor | None], _options: object) -> None:
    """|h| has a kink at 0, where rounding would choose the gradient, so no channel changes its sign in a verification."""
    for name, far in (("k", 0.1), ("h", 0.0)):
        x = cast(Tensor, inputs[name])
        inputs[name] = (x.abs() + far) * (1 - 2 * (torch.arange(x.shape[-1]) % 2)).to(x)


e68i = ElementwiseKernel("e68i", cell="elman::e68::Cell<true>", step=step_i, adjust=_keep_signs, **PARTS)
