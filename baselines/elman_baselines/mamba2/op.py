"""The interface to mamba_ssm: which of its kernels exist, and how to call them.

B batch, T time, C channels of x, B and C, I inner width, H heads, P width of a head, N width of the state.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from elman_baselines.library import Library, never_compiled
from elman_core.registry import pip_install

log = logging.getLogger("elman_core")
CHUNK = 256
INSTALL = pip_install("elman-baselines[mamba]")


@dataclass(frozen=True)
class Kernels:
    """mamba_ssm's functions."""

    scan: Any
    gated_norm: Any
    step: Any
    """The scan's state after one more token, in place, and its output."""
    whole: Any = None
    """Convolution, scan and gated norm as one, which makes again in the backward what lies between; needs causal_conv1d."""
    conv: Any = None
    """flash-linear-attention's convolution, where causal_conv1d is not there and that is."""


def kernels(x: Tensor) -> Kernels | None:
    """mamba_ssm for the device and dtype of x, or None where plain PyTorch runs.

    Raises:
        KernelError: mamba_ssm is unavailable and ELMAN_KERNELS=require.
    """
    if not x.is_cuda or x.dtype == torch.float64:
        return None
    return library.chosen()


def _import() -> Kernels:
    without_mamba1()
    combined = importlib.import_module("mamba_ssm.ops.triton.ssd_combined")
    gated = importlib.import_module("mamba_ssm.ops.triton.layernorm_gated")
    whole = None if combined.causal_conv1d_fn is None else combined.mamba_split_conv1d_scan_combined
    conv = _fla_convolution() if whole is None else None
    step = importlib.import_module("mamba_ssm.ops.triton.selective_state_update").selective_state_update
    return Kernels(combined.mamba_chunk_scan_combined, gated.rmsnorm_fn, step, whole, conv)


library = Library("mamba2", "mamba_ssm", "mamba_ssm", INSTALL, _import)


def _fla_convolution() -> Any:
    """None if it is not installed or cannot be imported: it is a fallback, and PyTorch's convolution is the next one."""
    try:
        return importlib.import_module("fla.modules.causal_conv1d.ops").causal_conv1d
    except Exception as error:
        log.debug("elman: no convolution from flash-linear-attention: %s", error)
        return None


def without_mamba1() -> None:
    """mamba_ssm always imports the compiled extension of Mamba-1, and is often installed without it.

    Mamba-2 and 3 never call it; with an empty module in its place, the rest can be imported, and Mamba-1 fails only if called.
    """
    name = "selective_scan_cuda"
    if name not in sys.modules and importlib.util.find_spec(name) is None:
        sys.modules[name] = types.ModuleType(name, "Stands in for the extension of Mamba-1, which is not installed.")


@never_compiled
def whole(
    found: Kernels, zxbcdt: Tensor, conv: Any, dt_bias: Tensor, a_H: Tensor, d_H: Tensor, norm: Any, headdim: int,
    starts_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """From the input projection to before the output projection: (y (B, T, I), state (B, H, P, N))."""
    return found.whole(
        zxbcdt, conv.weight.squeeze(1), conv.bias, dt_bias, a_H, D=d_H, chunk_size=CHUNK, activation="silu",
        rmsnorm_weight=norm.weight, rmsnorm_eps=norm.eps, headdim=headdim, ngroups=1, norm_before_gate=False,
        return_final_states=True, seq_idx=_documents(starts_BT),
    )  # fmt: skip


@never_compiled
def convolve(found: Kernels, xbc_BTC: Tensor, conv: Any) -> Tensor:
    """silu(conv(x B C)) from an empty window."""
    return found.conv(x=xbc_BTC, weight=conv.weight.squeeze(1), bias=conv.bias, activation="silu")[0]


@never_compiled
def scan(
    found: Kernels,
    x_BTHP: Tensor,
    dt_BTH: Tensor,
    a_H: Tensor,
    b_BTN: Tensor,
    c_BTN: Tensor,
    d_H: Tensor,
    state_BHPN: Tensor | None,
    starts_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `ssd_reference`."""
    y_BTHP, end_BHPN = found.scan(
        x_BTHP, dt_BTH, a_H, b_BTN.unsqueeze(2), c_BTN.unsqueeze(2), chunk_size=CHUNK, D=d_H,
        initial_states=state_BHPN, return_final_states=True, seq_idx=_documents(starts_BT),
    )  # fmt: skip
    return y_BTHP, end_BHPN.float()


@never_compiled
def step(
    found: Kernels, x_BHP: Tensor, dt_BH: Tensor, dt_bias: Tensor, a_H: Tensor, b_BN: Tensor, c_BN: Tensor, d_H: Tensor,
    state_BHPN: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `ssd_reference` for T = 1, with Δ before its bias and softplus. It shares Δ, a and D among a head by strides of 0."""
    end_BHPN, wide = state_BHPN.clone(), x_BHP.shape[-1]
    a_HPN = a_H[:, None, None].expand(-1, *end_BHPN.shape[2:])
    dt_BHP, bias_HP, d_HP = (x[..., None].expand(*x.shape, wide) for x in (dt_BH, dt_bias, d_H))
    y_BHP = found.step(
        end_BHPN, x_BHP, dt_BHP, a_HPN, b_BN[:, None], c_BN[:, None], d_HP, dt_bias=bias_HP, dt_softplus=True
    )
    return y_BHP, end_BHPN


def _documents(starts_BT: Tensor | None) -> Tensor | None:
    """The number of the document of each step, of which 0 is the one of the initial state; None if none begins."""
    return None if starts_BT is None else starts_BT.cumsum(1, dtype=torch.int32)


@never_compiled
def gated_norm(found: Kernels, y_BTI: Tensor, z_BTI: Tensor, norm: Any) -> Tensor:
    """RMSNorm(y ⊙ silu(z))."""
    return found.gated_norm(y_BTI, norm.weight, None, z=z_BTI, eps=norm.eps, norm_before_gate=False)
