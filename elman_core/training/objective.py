"""The forward of a training step: tokens to the mean cross-entropy in nats per byte, with or without a carried state.

Shapes: B rows, T time, D width, V vocabulary. Logits are upcast to float32 before the softmax.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from elman_core.kernels.runtime import autocast_dtype
from elman_core.model import LadderCache
from elman_core.model.rollback import MapTensor, map_state
from elman_core.nn import linear_cross_entropy
from elman_core.nn import restart as restarted
from elman_core.nn.cross_entropy import WIDEST
from elman_core.registry import ConfigError, State

States = list[State | None]
"""The state of every residual branch; None is the initial state."""


@dataclass
class Outputs:
    """The result of a forward: `loss` is the mean over all targets, `logits` are (B, T, V), or None if they were made in
    pieces."""

    loss: Tensor
    logits: Tensor | None
    states: States | None = None


def forward_loss(
    model: Any,
    inputs_BT: Tensor,
    targets_BT: Tensor,
    *,
    loss_chunk: int = 0,
    states: States | None = None,
    fresh_B: Tensor | None = None,
    starts_BT: Tensor | None = None,
    return_states: bool = False,
    logits: bool | None = None,
    counted: Tensor | None = None,
) -> Outputs:
    """Run the model over a window.

    Args:
        model: a `LadderForCausalLM`.
        inputs_BT, targets_BT: int64; targets of -100 do not count.
        loss_chunk: time steps whose logits exist at once; the backward recomputes them. 0: all.
        states: to continue from; None starts afresh.
        fresh_B: bool; rows that begin from the initial state instead of `states`.
        starts_BT: bool; where True a document begins, before which its row gets the initial state.
        logits: return the logits. Otherwise, head and loss are one operator that needs a third of the memory. None: if the
            vocabulary is small enough for all of them at once.
        counted: what the sum over the targets that count is divided by; None: the number of targets, all of which count.
        return_states: return the states after the window. Gradients flow through them: detach them to cut.
    """
    cache = None
    if states is not None:
        cache = LadderCache.from_states(states if fresh_B is None else restart(model, states, fresh_B))
    elif return_states:
        cache = LadderCache(num_blocks=len(model.model.layers))
    out = model.model(input_ids=inputs_BT, past_key_values=cache, use_cache=cache is not None, starts=starts_BT)
    loss, logits_BTV = _head_loss(model, out.last_hidden_state, targets_BT, loss_chunk, logits, counted)
    return Outputs(loss, logits_BTV, cache.states if cache is not None and return_states else None)


def _head_loss(
    model: Any, hidden_BTD: Tensor, targets_BT: Tensor, loss_chunk: int, logits: bool | None, counted: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    divisor = targets_BT.numel() if counted is None else counted
    if not loss_chunk or loss_chunk >= hidden_BTD.shape[1]:
        if logits is None:
            logits = model.config.vocab_size <= WIDEST
        if not logits and type(model.lm_head) is nn.Linear:  # not an adapter around it, which must be called
            total = linear_cross_entropy(hidden_BTD, model.lm_head.weight, targets_BT)
            return total / divisor, None
        logits_BTV = model.lm_head(hidden_BTD)
        flat = logits_BTV.flatten(0, 1).float()
        targets = targets_BT.flatten()
        if counted is None:
            return F.cross_entropy(flat, targets), logits_BTV
        return F.cross_entropy(flat, targets, reduction="sum") / counted, logits_BTV

    def piece(hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model.lm_head(hidden).flatten(0, 1).float(), targets.flatten(), reduction="sum")

    total = hidden_BTD.new_zeros((), dtype=torch.float32)
    for hidden, targets in zip(hidden_BTD.split(loss_chunk, dim=1), targets_BT.split(loss_chunk, dim=1), strict=True):
        if torch.is_grad_enabled():
            total = total + checkpoint(piece, hidden, targets, use_reentrant=False)
        else:
            total = total + piece(hidden, targets)
    return total / divisor, None


def restart(model: Any, states: States, fresh_B: Tensor) -> States:
    """`states` with the rows of `fresh_B` (bool) reset to the initial state. Reads nothing on the host."""
    start = initial_states(model)
    chosen: States = []
    for state, first in zip(states, start, strict=True):
        if not state or not first:  # none yet, or a branch that has no state
            chosen.append(state)
            continue
        rows = fresh_B.to(next(iter(state.values())).device)
        chosen.append({n: restarted(t, rows, first[n].to(t.dtype)) for n, t in state.items()})
    return chosen


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Eval mode without gradients; afterwards the previous mode."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def initial_states(model: Any) -> States:
    """The state before the first byte, for one row: what a single masked step leaves behind. Nothing waits for the device."""
    weight = model.model.embed_tokens.weight
    mask_11 = torch.zeros((1, 1), dtype=torch.bool, device=weight.device)
    with evaluating(model):
        x_11D = weight.new_zeros((1, 1, weight.shape[1]), dtype=autocast_dtype(weight))
        return [block.mixer(x_11D, None, mask_11)[1] for block in model.model.layers]


def mapped(fn: MapTensor, states: States | None) -> States | None:
    """`fn` on every tensor; None, the states before the first byte, stays None."""
    return None if states is None else [map_state(fn, state) for state in states]


def require_constant_state(model: Any, why: str) -> None:
    """Raise `ConfigError` if a mixer's state grows with the text (a key/value cache): such a state cannot be carried
    forever."""
    for block in model.model.layers:
        if block.mixer.state_growth != "constant":
            raise ConfigError(f"{why} needs a state of constant size; that of {type(block.mixer).__name__} grows")
