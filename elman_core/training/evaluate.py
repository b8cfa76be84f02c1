"""Bits per byte: on the held-out windows of a file (the primary metric), or over the whole file with a carried state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from elman_core.data import ByteFile
from elman_core.registry import ConfigError, DataError

from .objective import Outputs, States, evaluating, forward_loss, mapped, require_constant_state
from .ranks.group import Ranks


def on_windows(
    model: Any,
    file: ByteFile,
    offsets_N: NDArray[np.int64],
    length: int,
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
        offsets_N: where the windows start. length: bytes scored in each. rows: windows at a time.
        loss_chunk: time steps whose logits exist at once. 0: all.
        ranks: processes that share the work: each scores some of the batches of `rows`. Sums are taken in the order of batches,
            so the result does not depend on the number of ranks.
        forward: `forward_loss`, or its replacement for a sharded model.
        stop: asked before each batch, with the same answer on every rank; if true, the result is empty.
        counted: yields what it gets, and shows how far it is.

    Returns:
        loss (nats per byte), bits_per_byte, bytes.
    """
    ranks = ranks or Ranks()
    batches = np.array_split(offsets_N, math.ceil(len(offsets_N) / rows))
    own: dict[int, float] = {}
    with evaluating(model):
        for first in counted(range(0, len(batches), ranks.size)):
            if stop():
                return {}
            mine = first + ranks.rank
            tokens = file.windows(batches[min(mine, len(batches) - 1)], length + 1)
            # A rank without a batch repeats one: a sharded model needs every rank.
            nats = _nats(model, tokens, loss_chunk=loss_chunk, forward=forward)[0]
            if mine < len(batches):
                own[mine] = nats
    every = {index: nats for part in ranks.gather(own) for index, nats in part.items()}
    return _result(sum(every[index] for index in range(len(batches))), len(offsets_N) * length)


def on_everything(model: Any, file: ByteFile, length: int, rows: int, most: int | None = None) -> dict[str, Any]:
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
    nats, states = 0.0, None
    with evaluating(model):
        for first in range(0, part, length):
            width = min(length, part - first)
            more, states = _nats(model, file.windows(starts + first, width + 1), states, carry=True)
            nats += more
        rest = scored - part * rows  # fewer than `rows` bytes at the end continue the last part
        if rest:
            tail = mapped(lambda t: t[-1:], states)
            nats += _nats(model, file.windows(np.array([part * rows]), rest + 1), tail)[0]
    return _result(nats, scored)


def _nats(
    model: Any,
    tokens: NDArray[np.uint8],
    states: States | None = None,
    carry: bool = False,
    loss_chunk: int = 0,
    forward: Callable[..., Outputs] = forward_loss,
) -> tuple[float, States | None]:
    if model.config.vocab_size != 256:
        raise ConfigError(f"this model has {model.config.vocab_size} tokens, not the 256 bytes")
    device = model.model.embed_tokens.weight.device
    tokens_BT = torch.from_numpy(tokens).to(device, dtype=torch.long)
    out = forward(model, tokens_BT[:, :-1], tokens_BT[:, 1:], loss_chunk=loss_chunk, states=states, return_states=carry)
    return float(out.loss) * tokens[:, 1:].size, out.states


def _result(nats: float, count: int) -> dict[str, Any]:
    loss = nats / count
    return {"loss": loss, "bits_per_byte": loss / math.log(2), "bytes": count}
