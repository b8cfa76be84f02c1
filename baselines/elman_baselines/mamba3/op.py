"""The recurrence of Mamba-3: mamba_ssm's kernels, and two of our own for what they do not run.

B batch, T time, H heads, N width of a key, P of a value, R angles of a head.
"""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elman_baselines.library import Library, never_compiled
from elman_baselines.mamba2.op import INSTALL, without_mamba1
from elman_core.kernels import ElementwiseKernel, MatrixKernel
from elman_core.nn import causal_conv

from .reference import angle_step, trapezoid_reference

_HEADER = Path(__file__).parent / "csrc" / "mamba3_cells.h"
State = tuple[Tensor, Tensor, Tensor]

trapezoid = MatrixKernel(
    "mamba3",
    header=_HEADER,
    reference=trapezoid_reference,
    vectors=("k_past",),
    lines=("v_past",),
    scalars=("decay", "gain", "gain_past"),
    rows=(64, 128),
)
angles = ElementwiseKernel(
    "mamba3_angle",
    header=_HEADER,
    cell="elman::mamba3::Angle",
    step=angle_step,
    streams=("turn",),
    states=("angle",),
)


def kernels(x: Tensor, n: int, p: int, r: int) -> Any | None:
    """mamba_ssm's function for the device and dtype of x, and the widths of a key, a value and the angles; None where our own
    kernels or plain PyTorch run. It computes in bfloat16, whatever it is given.

    Raises:
        KernelError: mamba_ssm is unavailable and ELMAN_KERNELS=require.
    """
    powers = all(width >= 16 and width & (width - 1) == 0 for width in (n, p))
    return library.chosen() if x.is_cuda and x.dtype == torch.bfloat16 and powers and r % 2 == 0 else None


def _import() -> Any:
    without_mamba1()
    return importlib.import_module("mamba_ssm.ops.triton.mamba3.mamba3_siso_combined").mamba3_siso_combined


library = Library("mamba3", "mamba_ssm", "mamba_ssm", INSTALL, _import)


def wrapped(angle: Tensor) -> Tensor:
    """The same angle between -π and π."""
    return angle - 2 * math.pi * (angle / (2 * math.pi)).round()


@never_compiled
def library_scan(
    found: Any,
    keys: tuple[Tensor, Tensor],
    biases: tuple[Tensor, Tensor],
    x_BTHP: Tensor,
    z_BTHP: Tensor,
    rates: tuple[Tensor, Tensor, Tensor],
    theta_BTR: Tensor,
    d_H: Tensor,
) -> tuple[Tensor, State]:
    """As `scan` from the initial state, with D x added and times silu(z), by mamba_ssm.

    Args:
        rates: Δ, log α and λ before its sigmoid, (B, T, H). theta_BTR: before its tanh. The others: as in `scan`.
    """
    (k_BTN, q_BTN), (k_HN, q_HN), (dt, log, trap) = keys, biases, (rate.mT for rate in rates)
    y_BTHP, angle, ssm, k, v = found(
        Q=q_BTN[:, :, None], K=k_BTN[:, :, None], V=x_BTHP, ADT=log, DT=dt, Trap=trap, Q_bias=q_HN, K_bias=k_HN,
        Angles=theta_BTR[:, :, None].expand(-1, -1, x_BTHP.shape[2], -1), D=d_H, Z=z_BTHP, Input_States=None,
        chunk_size=64, return_final_states=True,
    )  # fmt: skip
    shift = torch.cat([k.flatten(1), v.flatten(1)], -1)[:, None].float()
    return y_BTHP, (wrapped(angle.float()), ssm.float().mT.contiguous(), shift)


def scan(
    keys: tuple[Tensor, Tensor],
    biases: tuple[Tensor, Tensor],
    x_BTHP: Tensor,
    rates: tuple[Tensor, Tensor, Tensor],
    turn_BTHR: Tensor,
    state: State | None,
    mask_BT: Tensor | None = None,
    starts_BT: Tensor | None = None,
) -> tuple[Tensor, State]:
    """h_t = α h_{t-1} + (1 - λ) Δ α x_{t-1} k_{t-1}ᵀ + λ Δ x_t k_tᵀ,  y_t = h_t q_t.

    Args:
        keys: k and q, (B, T, N), before their biases, (H, N), and their turns.
        rates: Δ, log α and λ, (B, T, H) in float32 or float64. turn_BTHR: what is added to the angles, in the same dtype.
        state: angles (B, H, R), S (B, H, N, P) and the last k and v side by side, (B, 1, H N + H P); None is zeros.
        mask_BT: bool; where False the states are held. starts_BT: bool; where True they are 0 before the step.

    Returns:
        (y_BTHP in the dtype of x, the last states in float32 or float64).
    """
    heads, flags = x_BTHP.shape[2], [None if flag is None else flag.mT for flag in (mask_BT, starts_BT)]
    angle_BC, s_BHNP, shift_B1C = (None,) * 3 if state is None else (state[0].flatten(1), *state[1:])
    turn_TBC = turn_BTHR.flatten(2).transpose(0, 1).contiguous()
    first_BC = turn_TBC.new_zeros(turn_TBC.shape[1:]) if angle_BC is None else angle_BC
    angle_TBC, end_BC = angles(turn_TBC, first_BC, *flags)
    angle_BTHR = angle_TBC.transpose(0, 1).unflatten(-1, (heads, -1))
    k, q = (turned(x[:, :, None] + bias, angle_BTHR).to(x_BTHP.dtype) for x, bias in zip(keys, biases, strict=True))
    both_BTC = torch.cat([k.flatten(2), x_BTHP.flatten(2)], -1)
    back = (1 - torch.arange(2, device=k.device, dtype=k.dtype)).expand(both_BTC.shape[-1], 2)  # the input before
    past_TBC, window = causal_conv(both_BTC.transpose(0, 1), back, None, shift_B1C, *flags)
    k_past, v_past = past_TBC.transpose(0, 1).split([heads * k.shape[-1], x_BTHP[0, 0].numel()], -1)
    dt, log, share = rates
    decay = log.exp()
    y_BTHP, end_BHNP = trapezoid(
        q, k, k_past.unflatten(-1, (heads, -1)), x_BTHP, v_past.unflatten(-1, (heads, -1)), decay, share * dt,
        (1 - share) * dt * decay, state_BHNV=s_BHNP, mask_BT=mask_BT, starts_BT=starts_BT,
    )  # fmt: skip
    return y_BTHP, (wrapped(end_BC.unflatten(-1, (heads, -1))), end_BHNP, window)


def from_last_start(end: State, turn_BTHR: Tensor, starts_BT: Tensor) -> State:
    """The last state of a row whose angles were not set to 0 where a document began, as if they had been."""
    angle_BHR, s_BHNP, shift_B1C = end
    heads, keys = s_BHNP.shape[1:3]
    steps = torch.arange(starts_BT.shape[1], device=starts_BT.device)
    before_BT = steps < (steps * starts_BT).amax(1, keepdim=True)
    angle_B1HR = wrapped((turn_BTHR * before_BT[..., None, None]).sum(1, keepdim=True))
    k_B1C, v_B1C = shift_B1C.split([heads * keys, shift_B1C.shape[2] - heads * keys], -1)
    k_B1HN = turned(k_B1C.unflatten(-1, (heads, keys)), -angle_B1HR)
    s_BHPN = turned(s_BHNP.mT, -angle_B1HR.transpose(1, 2))
    return wrapped(angle_BHR - angle_B1HR[:, 0]), s_BHPN.mT.contiguous(), torch.cat([k_B1HN.flatten(2), v_B1C], -1)


def turned(x_BTHN: Tensor, angle_BTHR: Tensor) -> Tensor:
    """x with its first 2 R channels, pair by pair, turned by the angles."""
    pairs = x_BTHN[..., : 2 * angle_BTHR.shape[-1]].unflatten(-1, (-1, 2))
    (even, odd), cos, sin = pairs.unbind(-1), angle_BTHR.cos(), angle_BTHR.sin()
    made = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
    return torch.cat([made, x_BTHN[..., made.shape[-1] :]], -1)
