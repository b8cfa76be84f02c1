"""Causal depthwise convolution over time whose window is state, so that pieces equal the whole."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .functional import compute_dtype


class CausalConv(nn.Module):
    """y_t = bias + sum_j weight_j u_{t-(K-1)+j}, channel by channel; before the start u is 0, or the window of the last call.

    A masked step is not there: the window holds, and the next step sees the inputs before it.

    Args:
        channels: C. width: K, at least 2. bias: whether there is one.
        dim: the axis of time of the input, 0 for (T, B, C) and 1 for (B, T, C).
    """

    def __init__(self, channels: int, width: int = 4, *, bias: bool = True, dim: int = 0) -> None:
        super().__init__()
        self.width, self.dim = width, dim
        self.weight = nn.Parameter(torch.empty(channels, 1, width))  # the shape of a depthwise torch.nn.Conv1d
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """U(-1/sqrt(K), 1/sqrt(K)), as torch.nn.Conv1d."""
        bound = 1 / math.sqrt(self.width)
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def state_shape(self) -> tuple[int, int]:
        """(K - 1, C), the window without its batch axis."""
        return self.width - 1, self.weight.shape[0]

    def forward(
        self, u: Tensor, window_BKC: Tensor | None = None, mask: Tensor | None = None, starts: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns (y in the shape and dtype of u, the new window (B, K - 1, C) in float32 or float64).

        Args:
            u: (T, B, C) or (B, T, C), as `dim` says.
            window_BKC: the last K - 1 inputs, oldest first; None is zeros.
            mask: bool in the layout of u without C; False holds the window, and y there is finite but means nothing.
            starts: bool likewise; True where a document begins, which sees no input of the one before.
        """
        steps, order, document = u.shape[self.dim], None, None
        if starts is not None:  # numbered in each row; the window is of number 0
            document = starts.cumsum(self.dim)
            current = document.narrow(self.dim, steps - 1, 1)
        if mask is not None:  # move the steps that count to the front, in order
            order = torch.argsort((~mask).to(torch.uint8), dim=self.dim, stable=True)
            u = _take(u, order, self.dim)
            document = None if document is None else document.gather(self.dim, order)
        padded = torch.cat((self._window(u, window_BKC), u), self.dim)
        if document is not None:
            document = torch.cat((torch.zeros_like(self._window(document, None)), document), self.dim)
        y = self._convolve(padded, steps, document)
        if mask is None or order is None:
            window = padded.narrow(self.dim, steps, self.width - 1)
            document = None if document is None else document.narrow(self.dim, steps, self.width - 1)
        else:
            y = _take(y, torch.argsort(order, dim=self.dim), self.dim)
            last = mask.sum(self.dim).unsqueeze(self.dim) + _range(self.width - 1, self.dim, mask.device)
            window = _take(padded, last, self.dim)
            document = None if document is None else document.gather(self.dim, last)
        if document is not None:
            window = torch.where((document == current).unsqueeze(-1), window, 0)
        window = window.transpose(0, 1) if self.dim == 0 else window
        # A copy: a view would keep all inputs of the call in memory for as long as the state lives.
        return y, window.to(compute_dtype(u), copy=True, memory_format=torch.contiguous_format)

    def _convolve(self, padded: Tensor, steps: int, document: Tensor | None) -> Tensor:
        taps = self.weight[:, 0].to(padded.dtype).unbind(-1)
        inputs = [padded.narrow(self.dim, j, steps) for j in range(self.width)]
        if document is not None:
            numbers = [document.narrow(self.dim, j, steps) for j in range(self.width)]
            inputs = [torch.where((n == numbers[-1]).unsqueeze(-1), x, 0) for n, x in zip(numbers, inputs, strict=True)]
        y = inputs[0] * taps[0]
        for x, tap in zip(inputs[1:], taps[1:], strict=True):
            y = torch.addcmul(y, x, tap)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def _window(self, u: Tensor, window_BKC: Tensor | None) -> Tensor:
        if window_BKC is not None:
            return (window_BKC.transpose(0, 1) if self.dim == 0 else window_BKC).to(u.dtype)
        shape = list(u.shape)
        shape[self.dim] = self.width - 1
        return u.new_zeros(shape)


def _take(x: Tensor, index: Tensor, dim: int) -> Tensor:
    return x.gather(dim, index.unsqueeze(-1).expand(*index.shape, x.shape[-1]))


def _range(n: int, dim: int, device: torch.device) -> Tensor:
    steps = torch.arange(n, device=device)
    return steps.unsqueeze(1) if dim == 0 else steps.unsqueeze(0)
