"""The delta rule with a decay for each channel: fla's kernels, and one of our own for what they do not run.

B batch, T time, H heads, K width of a key, V of a value.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elman_baselines.library import Library, never_compiled, warn_of_tuning
from elman_core.kernels import MatrixKernel
from elman_core.nn import l2_normalize
from elman_core.registry import pip_install

from .reference import delta_reference

INSTALL = pip_install("elman-baselines[fla]")
L2_EPS = 1e-6
"""Under the root of q's and k's length, as in fla."""


channel_delta = MatrixKernel(
    "kda",
    header=Path(__file__).parent / "csrc" / "kda_cell.h",
    reference=delta_reference,
    vectors=("decay", "erase"),
    rows=(64, 128),
)


@dataclass(frozen=True)
class Kernels:
    """fla's functions. The steps are the same without a backward, for a step of one byte."""

    kda: Any
    kda_step: Any
    gdn2: Any
    gdn2_step: Any
    gated_norm: Any


def kernels(x: Tensor) -> Kernels | None:
    """fla for the device and dtype of x, or None where our kernel or plain PyTorch runs.

    Raises:
        KernelError: fla is unavailable and ELMAN_KERNELS=require.
    """
    return library.chosen() if x.is_cuda and x.dtype != torch.float64 else None


def _import() -> Kernels:
    kda, gdn2 = (importlib.import_module(f"fla.ops.{name}") for name in ("kda", "gdn2"))
    norm = importlib.import_module("fla.modules.norm.fused_norm_gate")
    warn_of_tuning("kda, gdn2")
    return Kernels(
        kda.chunk_kda, kda.fused_recurrent_kda, gdn2.chunk_gdn2, gdn2.fused_recurrent_gdn2, norm.rms_norm_gated
    )


library = Library("kda", "fla", "flash-linear-attention", INSTALL, _import)


@never_compiled
def library_rule(
    found: Kernels,
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    log_BTHK: Tensor,
    gates: tuple[Tensor, Tensor],
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """As `rule`, by fla. Its backward multiplies matrices of v and w, and does not compile where their dtypes differ."""
    erase, write = gates
    one_gate = erase.shape[-1] == 1
    given = {"beta": erase[..., 0]} if one_gate else {"b": erase, "w": write.to(v_BTHV.dtype)}
    chunks, step = (found.kda, found.kda_step) if one_gate else (found.gdn2, found.gdn2_step)
    o_BTHV, end_BHKV = (chunks if q_BTHK.shape[1] > 1 else step)(
        q=q_BTHK, k=k_BTHK, v=v_BTHV, g=log_BTHK, initial_state=state, output_final_state=True,
        use_qk_l2norm_in_kernel=True, **given,
    )  # fmt: skip
    return o_BTHV, end_BHKV.float()


@never_compiled
def gated_norm(found: Kernels, o_BTHV: Tensor, g_BTHV: Tensor, norm: Any) -> Tensor:
    """RMSNorm(o) ⊙ sigmoid(g)."""
    return found.gated_norm(o_BTHV, g_BTHV, norm.weight, None, activation="sigmoid", eps=norm.eps)


def rule(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    log_BTHK: Tensor,
    gates: tuple[Tensor, Tensor],
    state: Tensor | None,
    mask_BT: Tensor | None = None,
    starts_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """S' = diag(α) S_{t-1},  S_t = S' + k (w ⊙ v - S'ᵀ (b ⊙ k))ᵀ,  o_t = S_tᵀ q / sqrt(K).

    Args:
        q_BTHK, k_BTHK: not normalised yet. log_BTHK: log α, at most 0, in float32 or float64.
        gates: b and w, (B, T, H, K) and (B, T, H, V); or β twice, (B, T, H, 1).
        state: (B, H, K, V), None is zeros. mask_BT: bool; where False the state is held. starts_BT: bool; where True
            S_{t-1} is 0.

    Returns:
        (o_BTHV in the dtype of v, the last state in float32 or float64).
    """
    (erase, write), decay_BTHK = gates, log_BTHK.exp()
    q, k = (l2_normalize(x.to(log_BTHK.dtype), L2_EPS) for x in (q_BTHK, k_BTHK))
    q, k, v = (x.to(v_BTHV.dtype) for x in (q * q.shape[-1] ** -0.5, k, write * v_BTHV))
    return channel_delta(
        q, k, decay_BTHK, decay_BTHK * erase, v, state_BHNV=state, mask_BT=mask_BT, starts_BT=starts_BT
    )
