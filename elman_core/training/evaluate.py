"""Bits per byte: on the held-out windows of a file (the primary metric), or over the whole file with a carried state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from elman_core.data import SEPARATOR, Batch, ByteFile, Heldout, PackedFile, windows_at
from elman_core.registry import DataError

from .objective import Outputs, States, evaluating, forward_loss, mapped, require_constant_state
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
    bits = sum(weight * one["bits_per_byte"] for (weight, _), one in zip(heldout, each, strict=True)) / whole
    counts: dict[str, Any] = {name: sum(one[name] for one in each) for name in ("bytes", "tokens") if name in each[0]}
    return {"loss": loss, "bits_per_byte": bits, **counts, "sources": [one["bits_per_byte"] for one in each]}


def on_windows(
    model: Any,
    heldout: Heldout,
    rows: int,
    *,
    loss_chunk: int = 0,
    sizes: NDArray[np.int64] | None = None,
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
        sizes: bytes of text for which each token stands, `token_bytes`; None: tokens are bytes.
        ranks: processes that share the work: each scores some of the batches of `rows`. Sums are taken in the order of batches,
            so the result does not depend on the number of ranks.
        forward: `forward_loss`, or its replacement for a sharded model.
        stop: asked before each batch, with the same answer on every rank; if true, the result is empty.
        counted: yields what it gets, and shows how far it is.

    Returns:
        loss (nats per token), bits_per_byte, bytes: those that count; tokens likewise, if there are `sizes`.
    """
    ranks = ranks or Ranks()
    batches = np.array_split(np.arange(heldout.windows), math.ceil(heldout.windows / rows))
    own: dict[int, tuple[float, int, int]] = {}
    with evaluating(model):
        for first in counted(range(0, len(batches), ranks.size)):
            if stop():
                return {}
            mine = first + ranks.rank
            batch = heldout.read(batches[min(mine, len(batches) - 1)])
            # A rank without a batch repeats one: a sharded model needs every rank.
            nats, count, _ = _nats(model, batch, loss_chunk=loss_chunk, forward=forward)
            if mine < len(batches):
                own[mine] = nats, count, _bytes(batch, count, sizes)
    every = {index: scored for part in ranks.gather(own) for index, scored in part.items()}
    count, size = (sum(every[index][i] for index in range(len(batches))) for i in (1, 2))
    return _result(sum(every[index][0] for index in range(len(batches))), count, None if sizes is None else size)


def on_everything(
    model: Any,
    file: ByteFile | PackedFile,
    length: int,
    rows: int,
    most: int | None = None,
    sizes: NDArray[np.int64] | None = None,
    counted: Callable[[Sequence[int]], Iterable[int]] = iter,
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
    nats, count, size, states = 0.0, 0, 0, None

    def read(offsets: np.ndarray, width: int) -> Batch:
        return windows_at(file, offsets, np.zeros(len(offsets), bool), width)

    with evaluating(model):
        for first in counted(range(0, part, length)):
            batch = read(starts + first, min(length, part - first))
            more, targets, states = _nats(model, batch, states, carry=True)
            nats, count, size = nats + more, count + targets, size + _bytes(batch, targets, sizes)
        rest = scored - part * rows  # fewer than `rows` bytes at the end continue the last part
        if rest:
            tail = mapped(lambda t: t[-1:], states)
            batch = read(np.array([part * rows]), rest)
            more, targets, _ = _nats(model, batch, tail)
            nats, count, size = nats + more, count + targets, size + _bytes(batch, targets, sizes)
    return _result(nats, count, None if sizes is None else size)


def in_tokens(heldout: Heldout, tokenizer: Any) -> Heldout:
    """Windows of bytes as the tokens of their text, each behind a token that ends documents. So models of different tokens
    are scored on the same bytes, but for those of a character that a window cuts."""
    eos = tokenizer.eos_token_id

    def read(numbers: NDArray[np.int64]) -> Batch:
        rows, size = [], 0
        for window in heldout.read(numbers).tokens[:, 1:]:
            text = window.tobytes().decode(errors="ignore")
            parts, size = text.split(chr(SEPARATOR)), size + len(text.encode())
            ids = tokenizer(parts, add_special_tokens=False, split_special_tokens=True, verbose=False).input_ids
            rows.append([eos, *(i for part in ids for i in [*part, eos])][:-1])
        tokens = np.full((len(rows), max(map(len, rows))), eos, dtype=np.uint32)
        counts = np.zeros(tokens.shape, dtype=bool)
        for row, ids in enumerate(rows):
            tokens[row, : len(ids)] = ids
            counts[row, 1 : len(ids)] = True
        return Batch(tokens, numbers, np.ones(len(rows), bool), counts=counts[:, 1:], size=size)

    return Heldout(heldout.windows, heldout.length, read)


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
    windows = Windows.of(batch).each(lambda t: t.to(device))
    inputs_BT, targets_BT = windows.pair()
    how: dict[str, Any] = {"loss_chunk": loss_chunk, "states": states, "return_states": carry}
    how["starts_BT"] = windows.starts
    if batch.counts is None:
        out = forward(model, inputs_BT, targets_BT, **how)
        return float(out.loss) * targets_BT.numel(), targets_BT.numel(), out.states
    out = forward(model, inputs_BT, targets_BT, counted=torch.ones((), device=device), **how)
    return float(out.loss), int(batch.counts.sum()), out.states


def _bytes(batch: Batch, count: int, sizes: NDArray[np.int64] | None) -> int:
    """The bytes of text for which the targets of a batch stand, of which `count` count."""
    if batch.size is not None:
        return batch.size
    if sizes is None:
        return count
    targets = batch.tokens[:, 1:] if batch.targets is None else batch.targets
    return int(sizes[targets if batch.counts is None else targets[batch.counts]].sum())


def _result(nats: float, count: int, size: int | None) -> dict[str, Any]:
    """`size`: bytes of text; None: tokens are bytes."""
    if not count:
        raise DataError("no target counts in this text: pack more text, or hold more out (data.heldout)")
    loss = nats / count
    if size is None:
        return {"loss": loss, "bits_per_byte": loss / math.log(2), "bytes": count}
    return {"loss": loss, "bits_per_byte": nats / math.log(2) / max(1, size), "bytes": size, "tokens": count}
