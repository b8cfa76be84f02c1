"""`gru` and `lstm`: the seam. torch's fused recurrences (cuDNN on a GPU) or the reference, with one signature.

T time, B batch, I width of the input, d width of the state. On a GPU the fused recurrences run in the dtype of x, float16 and
bfloat16 included; on a CPU 16-bit inputs are computed in float32. The states that go in and out stay float32 (or float64).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from elman_core.nn import without_autocast

from .reference import Weights, gru_reference

Fused = Callable[..., tuple[Tensor, ...]]


def gru(x_TBI: Tensor, weights: Weights, h0_Bd: Tensor, mask_TB: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(y (T, B, d), hT (B, d)), as `gru_reference`; three weights are the form that no library has fused."""
    if len(weights) == 3:
        return gru_reference(x_TBI, weights, h0_Bd, mask_TB)
    y_TBd, h_Bd = _fused(torch.gru, x_TBI, weights, (h0_Bd,), mask_TB)
    return y_TBd, h_Bd


def lstm(
    x_TBI: Tensor, weights: Weights, h0_Bd: Tensor, c0_Bd: Tensor, mask_TB: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(y (T, B, d), hT (B, d), cT (B, d)), as `lstm_reference`."""
    y_TBd, h_Bd, c_Bd = _fused(torch.lstm, x_TBI, weights, (h0_Bd, c0_Bd), mask_TB)
    return y_TBd, h_Bd, c_Bd


def _fused(
    run: Fused, x_TBI: Tensor, weights: Weights, state: tuple[Tensor, ...], mask_TB: Tensor | None
) -> tuple[Tensor, ...]:
    kept = torch.float64 if x_TBI.dtype == torch.float64 else torch.float32
    dtype = x_TBI.dtype if x_TBI.is_cuda else kept
    flat = [w.to(dtype) for w in weights]
    if x_TBI.is_cuda:
        flat = packed_for_cudnn(flat)
    begin = tuple(s.to(dtype).contiguous() for s in state)
    with without_autocast(x_TBI):
        if mask_TB is None:
            y_TBd, *end = _call(run, x_TBI.to(dtype).contiguous(), None, begin, flat)
        else:
            y_TBd, end = _without_masked(run, x_TBI.to(dtype), mask_TB, begin, flat)
    return (y_TBd.to(x_TBI.dtype), *(s.to(kept) for s in end))


def packed_for_cudnn(weights: list[Tensor]) -> list[Tensor]:
    """The weights as views of one block, matrices first: cuDNN's own layout, which torch else copies them into at every call,
    and warns of it."""
    block = torch.cat([w.flatten() for w in weights])
    return [part.view_as(w) for part, w in zip(block.split([w.numel() for w in weights]), weights, strict=True)]


def _call(
    run: Fused, data: Tensor, sizes: Tensor | None, state: tuple[Tensor, ...], flat: list[Tensor]
) -> tuple[Tensor, ...]:
    """One layer, one direction, with biases, no dropout. torch wants the LSTM's states as a pair and a GRU's alone."""
    hidden = state[0][None] if len(state) == 1 else tuple(s[None] for s in state)
    training = torch.is_grad_enabled()  # cuDNN keeps what the backward needs only when told that it trains
    if sizes is None:
        y, *end = run(data, hidden, flat, True, 1, 0.0, training, False, False)
    else:
        y, *end = run(data, sizes, hidden, flat, True, 1, 0.0, training, False)
    return (y, *(s[0] for s in end))


def _without_masked(
    run: Fused, x_TBI: Tensor, mask_TB: Tensor, state: tuple[Tensor, ...], flat: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Move the positions that count to the front of each row, run rows of different lengths, and move the outputs back.

    So any mask holds the state exactly, and the fused recurrence serves it. Costs one read of the lengths by the host.
    """
    steps = x_TBI.shape[0]
    order_TB = torch.argsort((~mask_TB).to(torch.uint8), dim=0, stable=True)
    count_B = mask_TB.sum(0)
    front_TBI = x_TBI.gather(0, order_TB[..., None].expand_as(x_TBI))
    packed = pack_padded_sequence(front_TBI, count_B.clamp(min=1).cpu(), enforce_sorted=False)
    rows, back = packed.sorted_indices, packed.unsorted_indices
    assert rows is not None and back is not None  # noqa: PT018
    begin = tuple(s.index_select(0, rows) for s in state)
    data, *end = _call(run, packed.data, packed.batch_sizes, begin, flat)
    y_TBd, _ = pad_packed_sequence(packed._replace(data=data), total_length=steps)
    y_TBd = y_TBd.gather(0, torch.argsort(order_TB, dim=0)[..., None].expand_as(y_TBd))
    some_B1 = (count_B > 0)[
        :, None
    ]  # a row without a single position that counts ran one step that must not count either
    kept = [torch.where(some_B1, e.index_select(0, back), s) for e, s in zip(end, state, strict=True)]
    return y_TBd, kept
