"""The E73 mixer: its forms. B batch, T time, I inner width, n rows and columns of the state."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from elman_core import option
from elman_core.nn import MatrixForm, MatrixWrapperConfig, MatrixWrapperMixer

from . import op

PARTS: dict[str, Any] = {"maps": ("w_q", "w_k", "w_z", "w_v"), "biases": {"w_z": 1.0}}


@dataclass(frozen=True)
class E73Config(MatrixWrapperConfig):
    """The size of E73's state, and what z multiplies."""

    form: Literal["column", "row", "full", "delta"] = option(
        "column",
        "z multiplies the state's elements by key, by value, by both; delta: what is read before a delta rule writes",
    )


class E73Mixer(MatrixWrapperMixer):
    """x → u → q, k, v = W u, z = tanh(W_z u + b_z) → S_t = tanh(diag(z) S_{t-1} + k vᵀ) (column) → o silu(o) → out.

    Parameters beside the wrapper's: w_q.weight, w_k.weight, w_v.weight, w_z.weight (n, I), and w_z.bias (n), published as b_z.
    State: S (B, 1, n, n), rows keys and columns values.
    """

    forms: ClassVar[Mapping[str, MatrixForm]] = {
        "column": MatrixForm(op.column, **PARTS),
        "row": MatrixForm(op.row, ("w_q", "w_k", "w_v", "w_z"), PARTS["biases"]),
        "full": MatrixForm(op.full, **PARTS),
        "delta": MatrixForm(op.delta, **PARTS),
    }

    def inputs(self, x_BTI: Tensor) -> list[Tensor]:
        q, k, *rest = super().inputs(x_BTI)
        if self.config.form in ("row", "delta"):
            return [q, k, *rest]
        z, v = rest
        return [q, k, torch.tanh(z), v] + ([z] if self.config.form == "full" else [])
