"""The end of a mixer with heads: RMS norm of each head, if there is one, times a gate, in one pass over memory.

    y = n act(g),   n = w rho o or o,   rho = (mean o^2 + eps)^(-1/2)
    with q = w dy act(g):   do = rho q - rho^3 o mean(o q) or dy act(g),   dg = dy n act'(g),   dw = sum rho o dy act(g)

On a GPU one Triton kernel each way (gated_triton.py), elsewhere plain PyTorch.
"""

from __future__ import annotations

import importlib
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from elman_core.kernels.runtime import transformed

from .add_norm import FUSED, triton_runs
from .functional import compute_dtype
from .norm import RMSNorm

Activation = Literal["sigmoid", "silu"]


def gated(o: Tensor, gate: Tensor, activation: Activation, norm: RMSNorm | None = None) -> Tensor:
    """`norm(o) * activation(gate)`, computed in float32 (float64 for float64), in the shape and dtype of o.

    Args:
        o: (..., H, V), outputs of H heads. gate: (..., H V), before its activation; a slice of a tensor is read in place.
        norm: over V; None for none.
    """
    weight = None if norm is None else norm.weight
    fits = o.is_cuda and o.dtype in FUSED and gate.dtype in FUSED and o.numel() > 0
    if fits and triton_runs() and not transformed():
        eps = 0.0 if norm is None else norm.eps
        y: Tensor = importlib.import_module(f"{__package__}.gated_triton").Gated.apply(
            o, gate, weight, activation == "silu", eps
        )
        return y
    wide = compute_dtype(o)
    logit = gate.to(wide).reshape(o.shape)
    n = o.to(wide) if norm is None else norm(o.to(wide))
    return (n * (F.silu(logit) if activation == "silu" else torch.sigmoid(logit))).to(o.dtype)
