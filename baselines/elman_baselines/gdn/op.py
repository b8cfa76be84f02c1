"""The interface to flash-linear-attention: which of its kernels exist, whether they are right here, and how to call them.

B batch, T time, H heads, K width of a key, V of a value.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from elman_baselines.library import Library, never_compiled, warn_of_tuning
from elman_core.kernels import KernelError
from elman_core.registry import pip_install

INSTALL = pip_install("elman-baselines[fla]")
CHECKED = 128
"""The head width at which fla's gradients were compared with float64 where fla itself refuses to compute them."""


@dataclass(frozen=True)
class Kernels:
    """fla's functions."""

    rule: Any
    step: Any
    """The same without a backward, for a step of one byte."""
    gated_norm: Any
    guarded: bool = False
    """Whether fla refuses to compute gradients here: Hopper with Triton 3.4 to 3.7.0, without tilelang."""


def kernels(x: Tensor, head_dim: int) -> Kernels | None:
    """fla for the device and dtype of x, or None where plain PyTorch runs.

    Raises:
        KernelError: gradients that were never checked here; or fla is unavailable and ELMAN_KERNELS=require.
    """
    if not x.is_cuda or x.dtype == torch.float64:
        return None
    found = library.chosen()
    if found is not None and found.guarded and head_dim != CHECKED and torch.is_grad_enabled():
        raise KernelError(
            f"fla's gated delta rule gives wrong gradients on Hopper with Triton 3.4 to 3.7.0, except for head_dim {CHECKED}, "
            f"which was checked against float64; head_dim is {head_dim}: pip install tilelang, or set ELMAN_KERNELS=off"
        )
    return found


def _import() -> Kernels:
    chunk: Any = importlib.import_module("fla.ops.gated_delta_rule.chunk")
    common = importlib.import_module("fla.ops.common.chunk_o")
    recurrent = importlib.import_module("fla.ops.gated_delta_rule.fused_recurrent")
    norm = importlib.import_module("fla.modules.norm.fused_norm_gate")
    guarded = (
        common.IS_NVIDIA_HOPPER
        and common.TRITON_ABOVE_3_4_0
        and not common.TRITON_ABOVE_3_7_1
        and importlib.util.find_spec("tilelang") is None
    )
    if guarded:
        chunk.chunk_bwd_dqkwg = lifted(chunk.chunk_bwd_dqkwg, common)
    step = recurrent.fused_recurrent_gated_delta_rule
    warn_of_tuning("gdn")
    return Kernels(chunk.chunk_gated_delta_rule, step, norm.rms_norm_gated, guarded)


library = Library("gdn", "fla", "flash-linear-attention", INSTALL, _import)


def lifted(refusing: Callable[..., Any], common: Any) -> Callable[..., Any]:
    """fla's function without its refusal for keys of width `CHECKED`; other widths and other callers still get the refusal."""
    lock = threading.Lock()

    @functools.wraps(refusing)
    def call(*args: Any, k: Tensor, **kwargs: Any) -> Any:
        if k.shape[-1] != CHECKED:
            return refusing(*args, k=k, **kwargs)
        with lock:
            common.TRITON_ABOVE_3_7_1 = True
            try:
                return refusing(*args, k=k, **kwargs)
            finally:
                common.TRITON_ABOVE_3_7_1 = False

    return call


@never_compiled
def rule(
    found: Kernels,
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    rates: tuple[Tensor, Tensor],
    state: Tensor | None,
    decay: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """As `delta_rule_reference`, with q and k not normalised yet.

    Args:
        rates: log α and β, (B, T, H). decay: A_log and dt_bias (H), if these and the sigmoid have yet to be applied to `rates`.
    """
    inside: dict[str, Any] = {}
    if decay is not None:
        inside = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
        inside |= {"A_log": decay[0], "dt_bias": decay[1]}
    run = found.rule if q_BTHK.shape[1] > 1 else found.step
    o_BTHV, end_BHKV = run(
        q=q_BTHK, k=k_BTHK, v=v_BTHV, g=rates[0], beta=rates[1], initial_state=state, output_final_state=True,
        use_qk_l2norm_in_kernel=True, **inside,
    )  # fmt: skip
    return o_BTHV, end_BHKV.float()


@never_compiled
def gated_norm(found: Kernels, o_BTHV: Tensor, g_BTHV: Tensor, norm: Any) -> Tensor:
    """RMSNorm(o) ⊙ silu(g)."""
    return found.gated_norm(o_BTHV, g_BTHV, norm.weight, None, activation="swish", eps=norm.eps)
