"""What decoding does with few rows, one launch each: products at the speed at which weights are read, and what lies between.

    linear   y = x Wᵀ + b, of which the first columns may pass through SiLU; `linears` several of them of one x
    norm     R' = R + x,  n = w R' (mean R'² + eps)^(-1/2)
    draw     a class from logits: penalty, temperature, top-k, top-p, and a race of exponentials

All run what the `decode…` sources of `elman_csrc` compile to, on NVIDIA GPUs (sm_80 and newer), for up to 64 rows and
without gradients: products in bfloat16 or float16, the others in float32 too. `takes…` says whether that is so; whoever asks
has another way at hand. The first two are operators known to FakeTensor, `torch.compile` and CUDA graphs; `draw` is called
outside of models.

Shapes: B rows, K inputs, N outputs; T time, d width of a cell; V classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from elman_core.kernels.choice import register, runs
from elman_core.kernels.spec import Case, KernelSpec

from . import grids, run, spec
from .launches import MOST_LINEARS, draw, linear, linears, norm
from .run import MOST_ROWS, NARROW, most_rows

__all__ = [
    "MOST_CLASSES", "MOST_LINEARS", "MOST_ROWS", "WIDEST_NORM",
    "draw", "linear", "linears", "norm", "takes", "takes_draw", "takes_norm",
]  # fmt: skip

MOST_CLASSES = 256
WIDEST_NORM = 8192


class _Shared:
    """What the chooser asks: a problem is ("linear", most rows, K, (N, …)), ("norm", D) or ("draw", V)."""

    name = spec.NAME

    def prepare(self, dtype: torch.dtype, kind: str, *_sizes: Any) -> str:
        run.module(None, kind, dtype, run.here())
        return "one launch"

    def cases(self, dtype: torch.dtype, *problem: Any) -> Sequence[Case]:
        return list(grids.first_use(dtype, *problem))

    def spec(self) -> KernelSpec:
        return spec.spec()


register(_Shared())


def takes(x: Tensor, *weights: Tensor, bias: Tensor | None = None) -> bool:
    """Whether `linear` runs here, or `linears` of several weights. Compiles and verifies it at the first use of a size.

    Args:
        x: (..., K). weights: (N, K) each. bias: (N,), of the one weight.

    Raises:
        KernelError: verified, and found wrong.
    """
    width, fits = x.shape[-1], run.alone(x) and x.dtype in NARROW
    for tensor in (*weights, *(() if bias is None else (bias,))):
        fits = fits and tensor.dtype == x.dtype and tensor.device == x.device
    if not fits or width % 8 or not 0 < x.numel() <= MOST_ROWS * width or not 1 <= len(weights) <= MOST_LINEARS:
        return False
    if any(weight.shape[1] != width for weight in weights) or (bias is not None and bias.shape != weights[0].shape[:1]):
        return False  # whoever has another way says what is wrong
    outputs = tuple(int(weight.shape[0]) for weight in weights)
    return runs(spec.NAME, x, "linear", most_rows(x.numel() // width), int(weights[0].shape[1]), outputs)


def takes_norm(x: Tensor, residual: Tensor | None, weight: Tensor, out_dtype: torch.dtype) -> bool:
    """Whether `norm` runs here. Compiles and verifies it at the first use of a width.

    Raises:
        KernelError: verified, and found wrong.
    """
    width = x.shape[-1]
    return (
        run.alone(x)
        and x.dtype == weight.dtype == out_dtype
        and weight.device == x.device
        and weight.shape == x.shape[-1:]
        and (residual is None or (residual.dtype == torch.float32 and residual.shape == x.shape))
        and (residual is None or residual.device == x.device)
        and width <= WIDEST_NORM
        and 0 < x.numel() <= MOST_ROWS * width
        and runs(spec.NAME, x, "norm", int(weight.shape[0]))
    )


def takes_draw(logits_BV: Tensor) -> bool:
    """Whether `draw` runs here, for any number of rows. Compiles and verifies it at the first use of a number of classes.

    Raises:
        KernelError: verified, and found wrong.
    """
    classes = logits_BV.shape[1]
    return run.alone(logits_BV) and 0 < classes <= MOST_CLASSES and runs(spec.NAME, logits_BV, "draw", int(classes))
