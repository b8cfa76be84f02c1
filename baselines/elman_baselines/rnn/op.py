"""`gru`, `lstm` and `slstm`, with one signature for kernels, torch's fused recurrences (cuDNN on a GPU) and the reference.

T time, B batch, I width of the input, d width of the state. On a GPU, kernels of our own (`elman_core.kernels.GatesKernel`) run
what they support: 16 bits, more than one step. cuDNN runs the rest in the dtype of x, and everything with
ELMAN_KERNELS=off. On a CPU our kernels train GRUs, and LSTMs of packed or masked rows, where that pays; elsewhere 16-bit inputs
are computed in float32. The states that go in and out stay float32 (or float64).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

from elman_core.kernels import GatesKernel, together
from elman_core.nn import gate, without_autocast

from .reference import Weights, gru_reference

Fused = Callable[..., tuple[Tensor, ...]]
Gates = tuple[Tensor, ...]
_HEADER = Path(__file__).parent / "csrc" / "rnn_cells.h"


def _lstm_step(p: Gates, u: Gates, _h: Tensor, c: Tensor) -> Gates:
    i, f, g, o = (a + b for a, b in zip(p, u, strict=True))
    c = gate(f)[0] * c + gate(i)[0] * g.tanh()
    return gate(o)[0] * c.tanh(), c


def _gru_step(p: Gates, u: Gates, h: Tensor) -> Gates:
    open_, shut = gate(p[1] + u[1])
    return (shut * (u[2] + gate(p[0] + u[0])[0] * p[2]).tanh() + open_ * h,)


def _reset(p: Gates, u: Gates, h: Tensor) -> Tensor:
    return gate(p[0] + u[0])[0] * h


def _gru_before_step(p: Gates, u: Gates, h: Tensor) -> Gates:
    open_, shut = gate(p[1] + u[1])
    return (shut * (p[2] + u[2]).tanh() + open_ * h,)


def _slstm_step(p: Gates, u: Gates, _h: Tensor, c: Tensor, n: Tensor, m: Tensor, exponential: bool = False) -> Gates:
    i, f, z, o = (a + b for a, b in zip(p, u, strict=True))
    some = torch.where(n == 0, 1.0, n)
    logit = torch.where(n == 0, -1000.0, (f if exponential else F.logsigmoid(f)) + m + some.log() - i)
    past, now = gate(logit)
    c = past * (c / some) + now * z.tanh()
    return gate(o)[0] * c, c, torch.ones_like(n), i - F.logsigmoid(-logit)


def _slstm_exp_step(p: Gates, u: Gates, h: Tensor, c: Tensor, n: Tensor, m: Tensor) -> Gates:
    return _slstm_step(p, u, h, c, n, m, exponential=True)


def _written(inputs: dict[str, Any], _options: Mapping[str, Any]) -> None:
    n = inputs["n"]
    inputs["n"] = torch.where(n > 0, n + 1, 0)


lstm_gates = GatesKernel(
    "lstm", header=_HEADER, cell="elman::rnn::Lstm", step=_lstm_step, gates=4, kept=4, states=("h", "c")
)
gru_gates = GatesKernel("gru", header=_HEADER, cell="elman::rnn::Gru", step=_gru_step, gates=3, kept=4, splits=True)
gru_before_gates = GatesKernel(
    "gru_before", header=_HEADER, cell="elman::rnn::GruBefore", step=_gru_before_step, inner=_reset, gates=3, kept=3
)
slstm_gates, slstm_exp_gates = (
    GatesKernel(
        name,
        header=_HEADER,
        cell=f"elman::rnn::{cell}",
        step=step,
        gates=4,
        kept=kept,
        states=tuple("hcnm"),
        adjust=_written,
    )
    for name, cell, step, kept in (("slstm", "Slstm", _slstm_step, 4), ("slstm_exp", "SlstmExp", _slstm_exp_step, 3))
)


def gru(
    x_TBI: Tensor, weights: Weights, h0_Bd: Tensor, mask_TB: Tensor | None = None, starts_TB: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(y (T, B, d), hT (B, d)), as `gru_reference`; three weights are the form that no library has fused."""
    if len(weights) == 3:
        if not _has_kernel(gru_before_gates, x_TBI, weights, starts_TB):
            return gru_reference(x_TBI, weights, h0_Bd, mask_TB, starts_TB)
        w_ih, w_hh, b_ih = weights
        y_TBd, h_Bd = gru_before_gates(_linear(x_TBI, w_ih, b_ih), w_hh, None, h0_Bd, mask=mask_TB, starts=starts_TB)
        return y_TBd, h_Bd
    if _has_kernel(gru_gates, x_TBI, weights, starts_TB):
        w_ih, w_hh, b_ih, b_hh = weights
        y_TBd, h_Bd = gru_gates(_linear(x_TBI, w_ih, b_ih), w_hh, b_hh, h0_Bd, mask=mask_TB, starts=starts_TB)
        return y_TBd, h_Bd
    y_TBd, h_Bd = _fused(torch.gru, x_TBI, weights, (h0_Bd,), mask_TB, starts_TB)
    return y_TBd, h_Bd


def lstm(
    x_TBI: Tensor,
    weights: Weights,
    h0_Bd: Tensor,
    c0_Bd: Tensor,
    mask_TB: Tensor | None = None,
    starts_TB: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(y (T, B, d), hT (B, d), cT (B, d)), as `lstm_reference`."""
    fast = x_TBI.is_cpu and mask_TB is None and starts_TB is None  # there, torch's LSTM is as fast for whole rows
    if not fast and _has_kernel(lstm_gates, x_TBI, weights, starts_TB):
        w_ih, w_hh, b_ih, b_hh = weights  # both biases are added to the same sums
        given = (_linear(x_TBI, w_ih), w_hh, b_ih + b_hh, h0_Bd, c0_Bd)
        y_TBd, h_Bd, c_Bd = lstm_gates(*given, mask=mask_TB, starts=starts_TB)
        return y_TBd, h_Bd, c_Bd
    y_TBd, h_Bd, c_Bd = _fused(torch.lstm, x_TBI, weights, (h0_Bd, c0_Bd), mask_TB, starts_TB)
    return y_TBd, h_Bd, c_Bd


def slstm(
    kernel: GatesKernel,
    x_TBI: Tensor,
    weights: Weights,
    states: Sequence[Tensor],
    mask_TB: Tensor | None = None,
    starts_TB: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """(y (T, B, d), and hT, cT, nT, mT, (B, d) each) of `slstm_gates` or `slstm_exp_gates`.

    Args:
        weights: w_ih (4 d, I), w_hh (4 d, d / heads) and b (4 d); rows head by head, in each i f z o.
        states: h, c, n, m, (B, d) each, zeros at the start. c / n is the mean of what was written, and n exp(m) the sum of its
            weights. A step takes any n, and leaves 1.
    """
    w_ih, w_hh, b = weights
    return kernel(_linear(x_TBI, w_ih, b), w_hh, None, *states, mask=mask_TB, starts=starts_TB)


def _has_kernel(kernel: GatesKernel, x_TBI: Tensor, weights: Weights, starts_TB: Tensor | None) -> bool:
    width = weights[1].shape[1]
    supported = x_TBI.shape[0] > 1 and kernel.supports(x_TBI.device, x_TBI.dtype, width)
    return supported and kernel.takes(x_TBI, width, starts_TB is not None)


def _linear(x_TBI: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    with without_autocast(x_TBI):
        return F.linear(x_TBI, weight.to(x_TBI.dtype), None if bias is None else bias.to(x_TBI.dtype))


def _fused(
    run: Fused,
    x_TBI: Tensor,
    weights: Weights,
    state: tuple[Tensor, ...],
    mask_TB: Tensor | None,
    starts_TB: Tensor | None,
) -> tuple[Tensor, ...]:
    kept = torch.float64 if x_TBI.dtype == torch.float64 else torch.float32
    dtype = x_TBI.dtype if x_TBI.is_cuda else kept
    flat = [w.to(dtype) for w in weights]
    if x_TBI.is_cuda:
        flat = packed_for_cudnn(flat)
    begin = tuple(s.to(dtype).contiguous() for s in state)
    with without_autocast(x_TBI):
        if mask_TB is None and starts_TB is None:
            y_TBd, *end = _call(run, x_TBI.to(dtype).contiguous(), None, begin, flat)
        else:
            by_documents = _by_documents
            if torch.compiler.is_compiling():  # the lengths are values: a tracer has none
                by_documents = torch.compiler.disable(by_documents)  # as a decorator it would import torch._dynamo
            y_TBd, end = by_documents(run, x_TBI.to(dtype), mask_TB, starts_TB, begin, flat)
    return (y_TBd.to(x_TBI.dtype), *(s.to(kept) for s in end))


def packed_for_cudnn(weights: list[Tensor]) -> list[Tensor]:
    """The weights as views of one block, matrices first: cuDNN's layout. Otherwise torch copies them into it at every call,
    with a warning."""
    block = torch.cat([w.flatten() for w in weights])
    return [part.view_as(w) for part, w in zip(block.split([w.numel() for w in weights]), weights, strict=True)]


def _call(
    run: Fused, data: Tensor, sizes: Tensor | None, state: tuple[Tensor, ...], flat: list[Tensor]
) -> tuple[Tensor, ...]:
    """One layer, one direction, with biases, no dropout. torch wants the LSTM's states as a pair and a GRU's alone."""
    hidden = state[0][None] if len(state) == 1 else tuple(s[None] for s in state)
    training = torch.is_grad_enabled()  # cuDNN keeps what the backward needs only when told that it trains
    with together():  # cuDNN does not say whether its blocks wait for each other
        if sizes is None:
            y, *end = run(data, hidden, flat, True, 1, 0.0, training, False, False)
        else:
            y, *end = run(data, sizes, hidden, flat, True, 1, 0.0, training, False)
    return (y, *(s[0] for s in end))


def _by_documents(
    run: Fused,
    x_TBI: Tensor,
    mask_TB: Tensor | None,
    starts_TB: Tensor | None,
    state: tuple[Tensor, ...],
    flat: list[Tensor],
) -> tuple[Tensor, list[Tensor]]:
    """Run each document as a separate sequence without its masked positions, and move the outputs back.

    So any mask holds the state exactly, and the fused recurrence supports packed rows too. The host reads the lengths once. S:
    documents with at least one unmasked position.
    """
    steps, rows, _ = x_TBI.shape
    real_BT = torch.ones(rows, steps, dtype=torch.bool, device=x_TBI.device) if mask_TB is None else mask_TB.T
    # In each row documents are numbered from 0, which is the one that goes on from `state`.
    number_BT = torch.zeros_like(real_BT, dtype=torch.int64) if starts_TB is None else starts_TB.T.cumsum(1)
    row_B1 = torch.arange(rows, device=x_TBI.device)[:, None]
    name_S, length_S = (row_B1 * (steps + 1) + number_BT)[real_BT].unique_consecutive(return_counts=True)
    row_S, number_S = name_S // (steps + 1), name_S % (steps + 1)
    y_BTd = x_TBI.new_zeros(rows, steps, state[0].shape[1])
    end = [torch.where(number_BT[:, -1:] == 0, s, 0) for s in state]
    if len(name_S):
        packed = pack_sequence(x_TBI.transpose(0, 1)[real_BT].split(length_S.tolist()), enforce_sorted=False)
        order, back = packed.sorted_indices, packed.unsorted_indices
        begin = tuple(torch.where(number_S[:, None] == 0, s[row_S], 0)[order] for s in state)
        data, *last = _call(run, packed.data, packed.batch_sizes, begin, flat)
        y_BTd[real_BT] = torch.cat(unpack_sequence(packed._replace(data=data)))
        final_S = number_S == number_BT[row_S, -1]
        for e, s in zip(end, last, strict=True):
            e[row_S[final_S]] = s[back][final_S]
    return y_BTd.transpose(0, 1), end
