"""Undo tokens of a recurrent state, for assisted decoding.

A key/value cache forgets its last n tokens by dropping them; a recurrent state must be restored. While a cache records, each
residual branch has a tape: the state before the recorded tokens and the mixer's inputs for them, which are run again.

Shapes: B batch, T new tokens, L recorded tokens, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from elman_core.registry import ConfigError, State

WINDOW = 64
"""Tokens at the end of a prompt that can be undone, unless a longer draft is announced."""

LIMIT = 1024
"""The most tokens that can be undone, over several forwards or in one that continues a state."""

Mixed = tuple[Tensor, State]
Mix = Callable[..., Mixed]
MapTensor = Callable[[Tensor], Tensor]


def map_state(fn: MapTensor, state: State | None) -> State | None:
    """`fn` on every tensor of a state; None, the state before the first token, stays None."""
    return None if state is None else {name: fn(t) for name, t in state.items()}


class Tape:
    """The record of a residual branch. `window`: tokens at the end of a prompt that can be undone."""

    def __init__(self, window: int = WINDOW) -> None:
        self.window = window
        self.start: State | None = None
        self.inputs: tuple[Tensor, Tensor] | None = None  # x (B, L, D), mask (B, L)
        self.mark: tuple[int, State | None] = 0, None  # the recorded tokens at the last crop, and the state after them
        self.mixer: Mix | None = None

    def run(self, mixer: Mix, x_BTD: Tensor, state: State | None, mask_BT: Tensor | None) -> Mixed:
        """The mixer's output for the new tokens and its state after them, recorded."""
        self.mixer = mixer
        if mask_BT is None:
            mask_BT = x_BTD.new_ones(x_BTD.shape[:2], dtype=torch.bool)
        most = self.window if state is None else max(LIMIT, self.window)
        outputs = []
        bulk = x_BTD.shape[1] - most
        if bulk > 0:  # of a prompt, all but the last few tokens are not recorded
            y_BTD, state = _run(mixer, x_BTD[:, :bulk], state, mask_BT[:, :bulk])
            outputs.append(y_BTD)
            x_BTD, mask_BT = x_BTD[:, bulk:], mask_BT[:, bulk:]
            self.inputs = None
        if self.inputs is None:
            self.start = state
            self.mark = (0, state)
            self.inputs = (x_BTD, mask_BT)
        else:
            self.inputs = torch.cat([self.inputs[0], x_BTD], 1), torch.cat([self.inputs[1], mask_BT], 1)
        y_BTD, state = _run(mixer, x_BTD, state, mask_BT)
        self._shorten(max(LIMIT, self.window))
        return torch.cat([*outputs, y_BTD], 1), state

    def _shorten(self, limit: int) -> None:
        if self.inputs is None or self.mixer is None or self.inputs[0].shape[1] <= limit:
            return
        x_BLD, mask_BL = self.inputs
        old = x_BLD.shape[1] - self.window
        _, self.start = _run(self.mixer, x_BLD[:, :old], self.start, mask_BL[:, :old])
        self.inputs = x_BLD[:, old:], mask_BL[:, old:]
        self.mark = (self.mark[0] - old, self.mark[1]) if self.mark[0] > old else (0, self.start)

    @torch.no_grad()
    def crop(self, n: int, state: State | None) -> State | None:
        """The state without the last `n` tokens."""
        recorded = 0 if self.inputs is None else self.inputs[0].shape[1]
        if n > recorded:
            raise ConfigError(f"cannot undo {n} tokens: only {recorded} are recorded")
        if self.inputs is None or self.mixer is None:
            return state
        kept = recorded - n
        x_BLD, mask_BL = self.inputs
        if n:
            begin, state = self.mark if self.mark[0] <= kept else (0, self.start)
            if begin < kept:
                _, state = _run(self.mixer, x_BLD[:, begin:kept], state, mask_BL[:, begin:kept])
        self.inputs = (x_BLD[:, :kept], mask_BL[:, :kept])
        self.mark = (kept, state)
        self._shorten(2 * self.window)
        return state

    def map(self, fn: MapTensor) -> None:
        """Apply `fn` to every tensor: rows are reordered, repeated or selected."""
        self.start = map_state(fn, self.start)
        self.mark = (self.mark[0], map_state(fn, self.mark[1]))
        if self.inputs is not None:
            self.inputs = fn(self.inputs[0]), fn(self.inputs[1])

    def __reduce__(self) -> tuple[type[Tape], tuple[int]]:
        """A copied cache continues with a new record: copying the old one would also copy the mixer's weights."""
        return Tape, (self.window,)


def _run(mixer: Mix, x_BTD: Tensor, state: Any, mask_BT: Tensor) -> Mixed:
    return mixer(x_BTD, state, None if bool(mask_BT.all()) else mask_BT)
