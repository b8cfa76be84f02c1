"""The recurrence of RWKV-7: fla's kernels, and one of our own for what they do not run.

B batch, T time, H heads, K width of a key, V of a value.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from elman_baselines.library import Library, never_compiled, warn_of_tuning
from elman_core.kernels import MatrixKernel
from elman_core.registry import pip_install

from .reference import dplr_reference

INSTALL = pip_install("elman-baselines[fla]")
LEAST = -0.6065306597126334
"""log of the smallest decay: -exp(-1/2)."""


def _removed(inputs: dict[str, Any], _options: Mapping[str, Any]) -> None:
    """What is read is of length 1, and a part of it is written back with the opposite sign: otherwise S grows."""
    share, read = inputs["again"], F.normalize(inputs["read"].double() - 0.75, dim=-1)
    inputs["read"], inputs["again"] = read.to(inputs["read"].dtype), (-read * share).to(share.dtype)


dplr = MatrixKernel(
    "dplr",
    header=Path(__file__).parent / "csrc" / "dplr_cell.h",
    reference=dplr_reference,
    vectors=("decay", "read", "again"),
    rows=(64,),
    adjust=_removed,
)


@dataclass(frozen=True)
class Kernels:
    """fla's functions. The step is the same without a backward, for a step of one byte."""

    rule: Any
    step: Any


def kernels(x: Tensor) -> Kernels | None:
    """fla for the device and dtype of x, or None where our kernel or plain PyTorch runs.

    Raises:
        KernelError: fla is unavailable and ELMAN_KERNELS=require.
    """
    return library.chosen() if x.is_cuda and x.dtype.itemsize < 8 else None


def _import() -> Kernels:
    made = importlib.import_module("fla.ops.rwkv7")
    warn_of_tuning("rwkv7")
    return Kernels(made.chunk_rwkv7, made.fused_mul_recurrent_rwkv7)


library = Library("rwkv7", "fla", "flash-linear-attention", INSTALL, _import)


@never_compiled
def library_rule(
    found: Kernels,
    r_BTHK: Tensor,
    log_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    unit_BTHK: Tensor,
    a_BTHK: Tensor,
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """As `rule`, by fla."""
    given: dict[str, Any] = {"r": r_BTHK, "w": log_BTHK, "k": k_BTHK, "v": v_BTHV}
    given |= {"scale": 1.0, "initial_state": state, "output_final_state": True}
    if r_BTHK.shape[1] > 1:
        # every decay is in the range for which its tensor cores are exact
        safe = {"safe_gate": True, "lower_bound": LEAST, "chunk_size": 64}
        o_BTHV, end_BHKV = found.rule(a=-unit_BTHK, b=unit_BTHK * a_BTHK, **given, **safe)
    else:
        o_BTHV, end_BHKV = found.step(kk=unit_BTHK, a=a_BTHK, **given)
    return o_BTHV, end_BHKV.float()


def rule(
    r_BTHK: Tensor,
    log_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    unit_BTHK: Tensor,
    a_BTHK: Tensor,
    state: Tensor | None,
    mask_BT: Tensor | None = None,
    starts_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """S_t = diag(w) S_{t-1} - (a ⊙ κ) (S_{t-1}ᵀ κ)ᵀ + k vᵀ,  o_t = S_tᵀ r.

    Args:
        log_BTHK: log w, at most 0, in float32 or float64. unit_BTHK: κ, of length 1.
        state: (B, H, K, V), None is zeros. mask_BT: bool; where False the state is held. starts_BT: bool; where True
            S_{t-1} is 0.

    Returns:
        (o_BTHV in the dtype of r, the last state in float32 or float64).
    """
    r, k, unit, a, v = (x.to(r_BTHK.dtype) for x in (r_BTHK, k_BTHK, unit_BTHK, a_BTHK, v_BTHV))
    return dplr(r, k, log_BTHK.exp(), -unit, unit * a, v, state_BHNV=state, mask_BT=mask_BT, starts_BT=starts_BT)
