"""The causal convolution in plain PyTorch: the truth, the CPU's, and the fallback of a GPU. Shapes as in op.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from elman_core.kernels.runtime import compute_dtype


def reference(
    x: Tensor,
    weight_CK: Tensor,
    bias_C: Tensor | None,
    window_BKC: Tensor | None,
    mask: Tensor | None,
    starts: Tensor | None,
    dim: int,
    silu: bool,
) -> tuple[Tensor, Tensor]:
    """As `causal_conv`, in float32 (float64 for float64); autograd differentiates it."""
    dtype, wide = x.dtype, compute_dtype(x, weight_CK)
    x, steps, keep = x.to(wide), x.shape[dim], weight_CK.shape[1] - 1
    if window_BKC is None:
        window_BKC = x.new_zeros(x.shape[1 - dim], keep, x.shape[2])
    window = (window_BKC.transpose(0, 1) if dim == 0 else window_BKC).to(wide)
    order, document = None, None
    if starts is not None:  # numbered in each row; the window is of number 0
        document = starts.cumsum(dim)
    if mask is not None:  # move the steps that count to the front, in order
        order = torch.argsort((~mask).to(torch.uint8), dim=dim, stable=True)
        x = _take(x, order, dim)
        document = None if document is None else document.gather(dim, order)
    padded = torch.cat((window, x), dim)
    inputs = [padded.narrow(dim, j, steps) for j in range(keep + 1)]
    if document is not None:
        document = torch.cat((document.new_zeros(window.shape[:2]), document), dim)
        numbers = [document.narrow(dim, j, steps) for j in range(keep + 1)]
        inputs = [torch.where((n == numbers[-1]).unsqueeze(-1), u, 0) for n, u in zip(numbers, inputs, strict=True)]
    taps = weight_CK.to(wide).unbind(-1)
    y = inputs[0] * taps[0]
    for u, tap in zip(inputs[1:], taps[1:], strict=True):
        y = torch.addcmul(y, u, tap)
    y = y if bias_C is None else y + bias_C.to(wide)
    y = F.silu(y) if silu else y
    if order is None or mask is None:
        last = padded.narrow(dim, steps, keep)
        document = None if document is None else document.narrow(dim, steps, keep)
    else:
        y = _take(y, torch.argsort(order, dim=dim), dim)
        places = mask.sum(dim, keepdim=True) + torch.arange(keep, device=x.device).unsqueeze(1 - dim)
        last = _take(padded, places, dim)
        document = None if document is None else document.gather(dim, places)
    if document is not None and starts is not None:
        last = torch.where((document == starts.sum(dim, keepdim=True)).unsqueeze(-1), last, 0)
    last = last.transpose(0, 1) if dim == 0 else last
    # A copy: a view would keep all inputs of the call in memory for as long as the state lives.
    return y.to(dtype), last.clone(memory_format=torch.contiguous_format)


def _take(x: Tensor, index: Tensor, dim: int) -> Tensor:
    return x.gather(dim, index.unsqueeze(-1).expand(*index.shape, x.shape[-1]))
