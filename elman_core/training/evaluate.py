"""Bits per byte: on the held-out windows of a file (the primary metric), or over the whole file with a carried state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
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
    """As `on_windows`; of several sources the mean of their losses by weight, all targets, and `sources`, the bits of each."""
    results: list[dict[str, Any]] = []
    for _, windows in heldout:
        result = on_windows(model, windows, rows, **how)
        if not result:
            return {}
        results.append(result)
    if len(results) == 1:
        return results[0]
    weights = [weight for weight, _ in heldout]

    def mean(name: str) -> float:
        return sum(weight * result[name] for weight, result in zip(weights, results, strict=True)) / sum(weights)

    mixed: dict[str, Any] = {"loss": mean("loss"), "bits_per_byte": mean("bits_per_byte")}
    for name in ("bytes", "tokens"):
        if name in results[0]:
            mixed[name] = sum(result[name] for result in results)
    mixed["sources"] = [result["bits_per_byte"] for result in results]
    return mixed


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
    own: dict[int, _Score] = {}
    with evaluating(model):
        for first in counted(range(0, len(batches), ranks.size)):
            if stop():
                return {}
            mine = first + ranks.rank
            # A rank without a batch repeats one: a sharded model needs every rank.
            batch = heldout.read(batches[min(mine, len(batches) - 1)])
            score, _ = _score(model, batch, sizes, forward, loss_chunk=loss_chunk)
            if mine < len(batches):
                own[mine] = score
    scores = {index: score for part in ranks.gather(own) for index, score in part.items()}
    return _result(sum((scores[index] for index in range(len(batches))), _Score()), sizes is not None)


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
    Raises `ConfigError` for a model whose state grows with the text."""
    require_constant_state(model, "evaluating a whole file")
    if file.size < 2:
        raise DataError(f"{file.path} has one byte: there is nothing to predict")
    scored = min(file.size - 1, most or file.size)
    rows = max(1, min(rows, scored))
    part = scored // rows
    starts = np.arange(rows) * part
    total = _Score()
    states: States | None = None

    def read(offsets: np.ndarray, width: int) -> Batch:
        return windows_at(file, offsets, np.zeros(len(offsets), bool), width)

    with evaluating(model):
        for first in counted(range(0, part, length)):
            batch = read(starts + first, min(length, part - first))
            score, states = _score(model, batch, sizes, states=states, return_states=True)
            total += score
        rest = scored - part * rows  # fewer than `rows` bytes at the end continue the last part
        if rest:
            tail = mapped(lambda t: t[-1:], states)
            score, _ = _score(model, read(np.array([part * rows]), rest), sizes, states=tail)
            total += score
    return _result(total, sizes is not None)


def in_tokens(heldout: Heldout, tokenizer: Any) -> Heldout:
    """Windows of bytes as the tokens of their text, each behind a token that ends documents. So models of different tokens
    are scored on the same bytes, but for those of a character that a window cuts."""
    eos = tokenizer.eos_token_id

    def read(numbers: NDArray[np.int64]) -> Batch:
        rows: list[list[int]] = []
        size = 0
        for window in heldout.read(numbers).tokens[:, 1:]:
            text = window.tobytes().decode(errors="ignore")
            size += len(text.encode())
            documents = text.split(chr(SEPARATOR))
            ids = tokenizer(documents, add_special_tokens=False, split_special_tokens=True, verbose=False).input_ids
            rows.append([token for document in ids for token in (eos, *document)])
        tokens = np.full((len(rows), max(map(len, rows))), eos, dtype=np.uint32)
        counts = np.zeros(tokens.shape, dtype=bool)
        for row, ids in enumerate(rows):
            tokens[row, : len(ids)] = ids
            counts[row, 1 : len(ids)] = True
        return Batch(tokens, numbers, np.ones(len(rows), bool), counts=counts[:, 1:], size=size)

    return Heldout(heldout.windows, heldout.length, read)


@dataclass(frozen=True)
class _Score:
    """Sums over the targets that count: the loss in nats, their number, and the bytes of text for which they stand."""

    nats: float = 0.0
    targets: int = 0
    bytes: int = 0

    def __add__(self, other: _Score) -> _Score:
        return _Score(self.nats + other.nats, self.targets + other.targets, self.bytes + other.bytes)


def _score(
    model: Any,
    batch: Batch,
    sizes: NDArray[np.int64] | None,
    forward: Callable[..., Outputs] = forward_loss,
    **how: Any,
) -> tuple[_Score, States | None]:
    """The score of a batch, and the states after its windows. `how`: as of `forward_loss`."""
    device = model.model.embed_tokens.weight.device
    windows = Windows.of(batch).each(lambda t: t.to(device))
    inputs_BT, targets_BT = windows.pair()
    counted = None if batch.counts is None else torch.ones((), device=device)  # divided by 1, the loss is a sum
    out = forward(model, inputs_BT, targets_BT, starts_BT=windows.starts, counted=counted, **how)
    if batch.counts is None:
        targets = targets_BT.numel()
        nats = float(out.loss) * targets
    else:
        targets = int(batch.counts.sum())
        nats = float(out.loss)
    return _Score(nats, targets, _bytes(batch, targets, sizes)), out.states


def _bytes(batch: Batch, count: int, sizes: NDArray[np.int64] | None) -> int:
    """The bytes of text for which the targets of a batch stand, of which `count` count."""
    if batch.size is not None:
        return batch.size
    if sizes is None:
        return count
    targets = batch.tokens[:, 1:] if batch.targets is None else batch.targets
    return int(sizes[targets if batch.counts is None else targets[batch.counts]].sum())


def _result(score: _Score, has_tokens: bool) -> dict[str, Any]:
    """`has_tokens`: whether targets are tokens of a tokenizer, not bytes."""
    if not score.targets:
        raise DataError("no target counts in this text: pack more text, or hold more out (data.heldout)")
    loss = score.nats / score.targets
    if not has_tokens:
        return {"loss": loss, "bits_per_byte": loss / math.log(2), "bytes": score.targets}
    bits = score.nats / math.log(2)
    return {"loss": loss, "bits_per_byte": bits / max(1, score.bytes), "bytes": score.bytes, "tokens": score.targets}
