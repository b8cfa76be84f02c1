"""The end of a mixer with heads: an optional RMS norm of each head, times a gate, in one pass over memory.

    y = n act(g),   n = w rho o or o,   rho = (mean o^2 + eps)^(-1/2)
    with q = w dy act(g):   do = rho q - rho^3 o mean(o q) or dy act(g),   dg = dy n act'(g),   dw = sum rho o dy act(g)

On a GPU one Triton kernel in each direction (gated_triton.py), elsewhere and under `torch.compile` plain PyTorch.
"""

from __future__ import annotations

import importlib
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elman_core.kernels.runtime import autocast_dtype, transformed

from .add_norm import FUSED, triton_runs
from .functional import compute_dtype
from .joined import many_rows
from .linear import is_bare, linear
from .norm import RMSNorm


def gated(
    o: Tensor,
    gate: Tensor,
    activation: Literal["sigmoid", "silu"],
    norm: RMSNorm | None = None,
    out: nn.Module | None = None,
) -> Tensor:
    """`norm(o) * activation(gate)`, computed in float32 (float64 for float64), in the shape and dtype of o.

    Args:
        o: (..., H, V), outputs of H heads. gate: (..., H V), before its activation; a slice of a tensor is read in place.
        norm: over V; None for none. out: a map of H V inputs; its outputs are then returned, and its input is not kept.
    """
    fits = o.is_cuda and o.dtype in FUSED and gate.dtype in FUSED and o.numel() > 0 and triton_runs()
    if fits and not (torch.compiler.is_compiling() or transformed(vmap=True)):
        apply = importlib.import_module(f"{__package__}.gated_triton").Gated.apply
        rest = (activation == "silu", 0.0 if norm is None else norm.eps)
        weight = None if norm is None else norm.weight
        if (
            out is not None
            and is_bare(out)
            and out.bias is None
            and many_rows(gate)
            and autocast_dtype(out.weight) == o.dtype
        ):
            return apply(o, gate, weight, out.weight.to(o.dtype), *rest)
        y = apply(o, gate, weight, None, *rest)
    else:
        wide = compute_dtype(o)
        logit = gate.to(wide).reshape(o.shape)
        n = o.to(wide) if norm is None else norm(o.to(wide))
        y = (n * (F.silu(logit) if activation == "silu" else torch.sigmoid(logit))).to(o.dtype)
    return y if out is None else linear(out, y.flatten(-2))
