"""Reads a prompt in pieces, so that memory does not grow with it; a long one on a GPU with its layers as a wave.

In a wave, lane l reads piece c while lane l + 1 reads piece c - 1. A lane is a stream that runs some of the residual branches.
A recurrence keeps few multiprocessors busy, step after step, so six of them side by side take the time of one.

Shapes: B rows, T time, V vocabulary.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from elman_core.kernels.launch import several_streams
from elman_core.model import LadderCache, LadderForCausalLM, LadderStaticCache
from elman_core.model.step_graph import is_watched
from elman_core.nn import scaled_once

LANES = 16
"""Streams at most: each has memory of its own, and a workspace of cuBLAS (32 MiB on an H100)."""

LEAST = 4
"""Pieces from which a wave is worth its streams."""

_AHEAD = 2  # waves that are launched before the host waits for an earlier one

_MOST, _NUMBERS = 16384, 2**24  # of a piece: tokens, and numbers of the residual stream


def prefill_chunk(device: torch.device) -> int:
    """Tokens of a prompt that a server reads at once, between the steps of others."""
    return 128 if device.type == "cpu" else 2048


def whole_chunk(model: LadderForCausalLM, length: int) -> int:
    """Tokens that are read at once of a prompt of `length`, where nobody waits.

    On a GPU the host takes as long for a layer's launches as the GPU for 2,000 to 10,000 of its steps. So a sixteenth of a long
    prompt is read at once, up to 16,384 tokens and 2**24 numbers of the residual stream: memory does not grow beyond that.
    Attention has a mask of a piece by all tokens before it, so its pieces stay short.
    """
    least = prefill_chunk(model.device)
    if model.device.type == "cpu" or any(layer.mixer.state_growth != "constant" for layer in model.model.layers):
        return least
    most = max(least, min(_MOST, _NUMBERS // model.config.hidden_size, length // 16))
    return 1 << most.bit_length() - 1


def least_rows(model: LadderForCausalLM) -> int:
    """Rows of a step and steps of a prompt are a multiple of this number, so that a row gets the same bits whatever is computed
    beside it.

    On a CPU, elementwise functions compute what is left over behind blocks of 32 numbers by other code; for products, see
    `elman_core.kernels.runtime.spare_rows`. On a GPU it is 1: there the bits depend on the number of rows.
    """
    return 32 // math.gcd(32, model.config.hidden_size) if model.device.type == "cpu" else 1


def prefill(
    model: LadderForCausalLM, text: Sequence[int], chunk: int | None = None, wave: bool = True
) -> tuple[LadderCache, Tensor]:
    """The state after `text` (bytes or token ids, not empty) for one row, and the logits (1, V) of what follows.

    Memory is bounded by `chunk`, the tokens at once (None: `whole_chunk`), but for the tokens themselves and for states that
    grow. `wave`: whether several layers may work at a time, where that is possible.
    """
    whole = torch.frombuffer(bytearray(text), dtype=torch.uint8) if isinstance(text, bytes) else torch.tensor(text)
    cache = LadderCache(num_blocks=len(model.model.layers))
    tokens_1T = whole.to(model.device)[None]
    chunk = chunk or whole_chunk(model, len(whole))
    return cache, read(model, tokens_1T, cache, chunk, least=least_rows(model), wave=wave)


def read(
    model: LadderForCausalLM,
    tokens_BT: Tensor,
    cache: LadderCache | LadderStaticCache,
    chunk: int,
    mask_BT: Tensor | None = None,
    least: int = 1,
    wave: bool = True,
) -> Tensor:
    """Read tokens into `cache`, `chunk` steps at once; returns the logits (B, V) of what follows.

    `mask_BT` is 0 where a row is padded. The steps of a piece are padded to a multiple of `least`. A `wave`, as of `prefill`,
    needs one GPU, no mask and a model without hooks.
    """
    pieces = tokens_BT.split(chunk, dim=1)
    masks = [None] * len(pieces) if mask_BT is None else mask_BT.bool().split(chunk, dim=1)

    def piece(index: int) -> Tensor:
        mask = masks[index]
        spare = -pieces[index].shape[1] % least
        if spare:
            real = torch.ones_like(pieces[index], dtype=torch.bool) if mask is None else mask
            mask = F.pad(real, (0, spare))
        padded = F.pad(pieces[index].long(), (0, spare))
        return model(padded, mask, past_key_values=cache, use_cache=True, logits_to_keep=spare + 1).logits[:, 0]

    last = len(pieces) - 1
    with torch.inference_mode(), scaled_once(model):
        if wave and len(pieces) >= LEAST and mask_BT is None and _has_lanes(model):
            piece(0)  # on the stream of the caller, where what is compiled or computed once comes into being
            read_as_wave(model, pieces[1:last], cache)
        else:
            for index in range(last):
                piece(index)
        return piece(last)


def _has_lanes(model: LadderForCausalLM) -> bool:
    """Whether the model is on one GPU, and no code of others, which knows one stream, runs in it."""
    one = model.device.type == "cuda" and {p.device for p in model.parameters()} == {model.device}
    return one and not is_watched(model)


def read_as_wave(model: LadderForCausalLM, pieces: Sequence[Tensor], cache: LadderCache | LadderStaticCache) -> None:
    """Read pieces (B, T) into a cache that has read another one. The states are then ready for the caller's stream."""
    ladder, device = model.model, model.device
    depth = len(ladder.layers)
    lanes = min(depth, LANES)
    branches = [range(depth * lane // lanes, depth * (lane + 1) // lanes) for lane in range(lanes)]
    caller = torch.cuda.current_stream(device)
    streams = [torch.cuda.Stream(device) for _ in branches]
    made: list[Any] = [None] * lanes  # by lane: its last output, the residual stream below, the event of its end
    under_way: deque[list[Any]] = deque()  # what the lanes read in the last waves: no stream may get its memory yet
    before = cache.states  # likewise

    def advance(lane: int, piece: Tensor) -> None:
        if lane:
            x_BTD, residual_BTD, end = made[lane - 1]
            streams[lane].wait_event(end)
        else:
            x_BTD, residual_BTD = ladder.embed_tokens(piece.long()), None
        for index in branches[lane]:
            entry = cache.layers[index]
            x_BTD, residual_BTD, state = ladder.layers[index](x_BTD, residual_BTD, entry.get())
            entry.set(state, piece.shape[1])
        made[lane] = x_BTD, residual_BTD, streams[lane].record_event()

    try:
        with several_streams(device):
            for stream in streams:
                stream.wait_stream(caller)
            for wave in range(len(pieces) + lanes - 1):
                under_way.append(list(made))
                if len(under_way) > _AHEAD:
                    for _, _, end in filter(None, under_way[1]):  # then what they took, of the wave before, is free
                        end.synchronize()
                    under_way.popleft()
                # Later lanes go first: they take what the lane before them made in the last wave.
                for lane in reversed(range(max(0, wave - len(pieces) + 1), min(lanes, wave + 1))):
                    with torch.cuda.stream(streams[lane]):
                        advance(lane, pieces[wave - lane])
    finally:
        for stream in streams:
            stream.synchronize()
    del before
    for state in cache.states:
        for tensor in (state or {}).values():
            tensor.record_stream(caller)  # it was allocated for a lane, and is freed after the caller has used it
