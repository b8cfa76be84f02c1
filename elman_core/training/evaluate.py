"""Bits per byte: on the held-out windows of a file (the primary metric), or over the whole file with a carried state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from elman_core.data import Batch, ByteFile, Heldout, PackedFile, windows_at
from elman_core.registry import DataError

from .objective import Outputs, States, evaluating, forward_loss, mapped, require_constant_state
from .prefetch import tensors
from .ranks.group import Ranks
from .step import Windows


def on_mixture(model: Any, heldout: Sequence[tuple[float, Heldout]], rows: int, **how: Any) -> dict[str, Any]:
    """As `on_windows`; of several sources the mean of their losses by weight, all targets, and `sources`, the bits of each.

    Args:
        heldout: windows, each with its weight.
    """
    each = []
    for _, windows in heldout:
        each.append(on_windows(model, windows, rows, **how))
        if not each[-1]:
            return {}
    if len(each) == 1:
        return each[0]
    whole = sum(weight for weight, _ in heldout)
    loss = sum(weight * one["loss"] for (weight, _), one in zip(heldout, each, strict=True)) / whole
    result = _result(loss, sum(one["bytes"] for one in each))
    return result | {"sources": [one["bits_per_byte"] for one in each]}


def on_windows(
    model: Any,
    heldout: Heldout,
    rows: int,
    *,
    loss_chunk: int = 0,
    ranks: Ranks | None = None,
    forward: Callable[..., Outputs] = forward_loss,
    stop: Callable[[], bool] = lambda: False,
    counted: Callable[[Sequence[int]], Iterable[int]] = iter,
) -> dict[str, Any]:
    """Mean loss over fixed windows, each read from the initial state.

    Args:
        model: evaluated in eval mode; its mode is restored. Autocast is up to the caller.
        heldout: the windows. rows: windows at a time.
        loss_chunk: time steps whose logits exist at once. 0: all.
        ranks: processes that share the work: each scores some of the batches of `rows`. Sums are taken in the order of batches,
            so the result does not depend on the number of ranks.
        forward: `forward_loss`, or its replacement for a sharded model.
        stop: asked before each batch, with the same answer on every rank; if true, the result is empty.
        counted: yields what it gets, and shows how far it is.

    Returns:
        loss (nats per byte), bits_per_byte, bytes: those that count.
    """
    ranks = ranks or Ranks()
    batches = np.array_split(np.arange(heldout.windows), math.ceil(heldout.windows / rows))
    own: dict[int, tuple[float, int]] = {}
    with evaluating(model):
        for first in counted(range(0, len(batches), ranks.size)):
            if stop():
                return {}
            mine = first + ranks.rank
            batch = heldout.read(batches[min(mine, len(batches) - 1)])
            # A rank without a batch repeats one: a sharded model needs every rank.
            nats, count, _ = _nats(model, batch, loss_chunk=loss_chunk, forward=forward)
            if mine < len(batches):
                own[mine] = nats, count
    every = {index: scored for part in ranks.gather(own) for index, scored in part.items()}
    count = sum(every[index][1] for index in range(len(batches)))
    if not count:
        raise DataError("nothing counts in the held-out windows: pack more text, or hold more out (data.heldout)")
    return _result(sum(every[index][0] for index in range(len(batches))) / count, count)


def on_everything(
    model: Any, file: ByteFile | PackedFile, length: int, rows: int, most: int | None = None
) -> dict[str, Any]:
    """Mean loss over every byte of the file but the first (at most `most`), each predicted from all before it in its part.

    The file is cut into `rows` parts of equal length, read side by side with a carried state; only at the start of each part
    is there less context.

    Raises:
        ConfigError: a model whose state grows with the text.
    """
    require_constant_state(model, "evaluating a whole file")
    if file.size < 2:
        raise DataError(f"{file.path} has one byte: there is nothing to predict")
    scored = min(file.size - 1, most or file.size)
    rows = max(1, min(rows, scored))
    part = scored // rows
    starts = np.arange(rows) * part
    nats, count, states = 0.0, 0, None

    def read(offsets: np.ndarray, width: int) -> Batch:
        return windows_at(file, offsets, np.zeros(len(offsets), bool), width)

    with evaluating(model):
        for first in range(0, part, length):
            width = min(length, part - first)
            more, counted, states = _nats(model, read(starts + first, width), states, carry=True)
            nats, count = nats + more, count + counted
        rest = scored - part * rows  # fewer than `rows` bytes at the end continue the last part
        if rest:
            tail = mapped(lambda t: t[-1:], states)
            more, counted, _ = _nats(model, read(np.array([part * rows]), rest), tail)
            nats, count = nats + more, count + counted
    return _result(nats / max(1, count), count)


def _nats(
    model: Any,
    batch: Batch,
    states: States | None = None,
    carry: bool = False,
    loss_chunk: int = 0,
    forward: Callable[..., Outputs] = forward_loss,
) -> tuple[float, int, States | None]:
    """The sum of the loss, over how many targets, and the states after the windows."""
    device = model.model.embed_tokens.weight.device
    tokens, targets, counts = tensors(batch, lambda t: t.to(device))
    inputs_BT, targets_BT = Windows(tokens, targets=targets, counts=counts).pair()
    how: dict[str, Any] = {"loss_chunk": loss_chunk, "states": states, "return_states": carry}
    if batch.counts is None:
        out = forward(model, inputs_BT, targets_BT, **how)
        return float(out.loss) * targets_BT.numel(), targets_BT.numel(), out.states
    out = forward(model, inputs_BT, targets_BT, counted=torch.ones((), device=device), **how)
    return float(out.loss), int(batch.counts.sum()), out.states


def _result(loss: float, count: int) -> dict[str, Any]:
    return {"loss": loss, "bits_per_byte": loss / math.log(2), "bytes": count}
