"""The causal convolution in plain PyTorch: the truth; runs on a CPU, and on a GPU without a kernel. Shapes as in op.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from elman_core.kernels.runtime import compute_dtype


def reference(
    x_TBC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, window_BKC: Tensor | None, mask_TB: Tensor | None,
    starts_TB: Tensor | None, silu: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `causal_conv`, in float32 (float64 for float64); autograd differentiates it."""
    wide = compute_dtype(x_TBC, weight_CK)
    steps, rows, channels = x_TBC.shape
    keep = weight_CK.shape[1] - 1
    x = x_TBC.to(wide)
    window = x.new_zeros(keep, rows, channels) if window_BKC is None else window_BKC.to(wide).transpose(0, 1)
    # The number of the document in its row; the window has number 0.
    document = None if starts_TB is None else starts_TB.cumsum(0)
    order = None
    if mask_TB is not None:  # move the steps that count to the front, in order
        order = torch.argsort((~mask_TB).to(torch.uint8), dim=0, stable=True)
        x = _take(x, order)
        document = None if document is None else document.gather(0, order)
    padded = torch.cat((window, x))
    inputs = [padded[j : j + steps] for j in range(keep + 1)]
    if document is not None:
        document = torch.cat((document.new_zeros(keep, rows), document))
        numbers = [document[j : j + steps] for j in range(keep + 1)]
        inputs = [torch.where((n == numbers[-1]).unsqueeze(-1), u, 0) for n, u in zip(numbers, inputs, strict=True)]
    taps = weight_CK.to(wide).unbind(-1)
    y = inputs[0] * taps[0]
    for u, tap in zip(inputs[1:], taps[1:], strict=True):
        y = torch.addcmul(y, u, tap)
    y = y if bias_C is None else y + bias_C.to(wide)
    y = F.silu(y) if silu else y
    last = padded[steps:]
    last_document = None if document is None else document[steps:]
    if order is not None and mask_TB is not None:
        y = _take(y, torch.argsort(order, dim=0))
        places = mask_TB.sum(0) + torch.arange(keep, device=x.device).unsqueeze(1)
        last = _take(padded, places)
        last_document = None if document is None else document.gather(0, places)
    if last_document is not None and starts_TB is not None:
        last = torch.where((last_document == starts_TB.sum(0)).unsqueeze(-1), last, 0)
    # A copy: a view would keep all inputs of the call in memory for as long as the state lives.
    return y.to(x_TBC.dtype), last.transpose(0, 1).clone(memory_format=torch.contiguous_format)


def _take(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(0, index.unsqueeze(-1).expand(*index.shape, x.shape[-1]))
