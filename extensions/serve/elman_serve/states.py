"""States of running texts as rows of one batch, and states after prefixes of prompts.

A recurrent state has a constant size, so a slot is a row: nothing is paged, nothing fragments.

Shapes: P rows, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from elman_core import LadderCache, State
from elman_core.extension import least_rows, prefill

Owner = TypeVar("Owner")
States = list[State]


def size_of(states: States) -> int:
    """Bytes of the tensors."""
    return sum(tensor.nbytes for state in states for tensor in state.values())


class Rows(Generic[Owner]):
    """The batch. It has a multiple of `least_rows` rows; those without an owner are computed and not looked at.

    Attributes:
        owners: of each row, None for a free one.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.unit = model, least_rows(model)
        self.owners: list[Owner | None] = []
        self._states: States = []

    def live(self) -> list[int]:
        """The rows that have an owner."""
        return [row for row, owner in enumerate(self.owners) if owner is not None]

    def free(self, row: int) -> None:
        self.owners[row] = None

    def join(self, joining: list[tuple[Owner, States]]) -> None:
        """Add rows with the states (one row each) of new owners, and close gaps where that makes the batch smaller."""
        live = self.live()
        rows = -(-(len(live) + len(joining)) // self.unit) * self.unit
        if not joining and rows == len(self.owners):
            return
        if not rows:
            self.owners, self._states = [], []
            return
        padding = rows - len(live) - len(joining)
        index = torch.tensor(live, dtype=torch.long, device=self.model.device)
        made: States = []
        for branch, like in enumerate(self._states or joining[0][1]):
            made.append({})
            for name, tensor in like.items():
                parts = [tensor.index_select(0, index)] if live else []
                parts += [states[branch][name] for _, states in joining]
                made[-1][name] = torch.cat([*parts, tensor.new_zeros(padding, *tensor.shape[1:])])
        self.owners = [*(self.owners[row] for row in live), *(owner for owner, _ in joining), *[None] * padding]
        self._states = made

    def step(self, tokens: list[int]) -> Tensor:
        """Feed one byte to every row; the logits (P, V) of what follows."""
        cache = LadderCache.from_states(self._states)
        tokens_P1 = torch.tensor(tokens, device=self.model.device)[:, None]
        logits_PV: Tensor = self.model(input_ids=tokens_P1, past_key_values=cache, use_cache=True).logits[:, -1]
        self._states = [state or {} for state in cache.states]
        return logits_PV


@torch.inference_mode()
def independent(model: Any, slots: int) -> bool:
    """Whether a row's logits have the same bits in the smallest and in the largest batch, which a step of both shows."""
    rows: Rows[int] = Rows(model)
    count = -(-slots // rows.unit) * rows.unit
    after = [state or {} for state in prefill(model, b"The rows of a batch")[0].states]
    tokens = [(37 * row) % 256 for row in range(count)]

    def logits(chosen: range) -> Tensor:
        batch: Rows[int] = Rows(model)
        batch.join([(row, after) for row in chosen])
        batch.step([tokens[row] for row in chosen])  # now their states differ
        return batch.step([tokens[row] for row in chosen])

    whole_PV = logits(range(count))
    ends = (range(rows.unit), range(count - rows.unit, count))
    return all(torch.equal(logits(end), whole_PV[end.start : end.stop]) for end in ends)


class Prefixes:
    """States after prefixes of prompts and the logits there, the least recently used thrown away first.

    A prompt is read in pieces of `piece` bytes; a state is kept after each, and after the last byte. A text continues only
    from where its own pieces would end, so it gets the same bits as if it were read from its start.

    Args:
        most: bytes to keep at most; 0 keeps nothing. piece: bytes.

    Attributes:
        bytes: kept now.
    """

    def __init__(self, most: int, piece: int) -> None:
        self.most, self.piece, self.bytes = most, piece, 0
        self._kept: OrderedDict[bytes, tuple[States, Tensor]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def _keys(self, text: bytes) -> Iterator[tuple[int, bytes]]:
        digest = hashlib.sha256()
        for start in range(0, len(text), self.piece):
            digest.update(text[start : start + self.piece])
            yield min(start + self.piece, len(text)), digest.digest()

    def find(self, text: bytes) -> tuple[int, States, Tensor] | None:
        """(bytes, states, logits (1, V)) of the longest prefix that is kept; None if none is."""
        if not self._kept:
            return None
        for length, key in reversed(list(self._keys(text))):
            if key in self._kept:
                self._kept.move_to_end(key)
                return length, *self._kept[key]
        return None

    def keep(self, text: bytes, states: Iterable[State | None], logits_1V: Tensor) -> None:
        """Keep copies of the states after `text`, which share no memory with a longer piece."""
        copies = [{name: tensor.clone() for name, tensor in (state or {}).items()} for state in states]
        key = hashlib.sha256(text).digest()
        if key not in self._kept:
            self._kept[key] = (copies, logits_1V.clone())
            self.bytes += size_of(copies) + logits_1V.nbytes
        while self.bytes > self.most:
            _, (old, logits) = self._kept.popitem(last=False)
            self.bytes -= size_of(old) + logits.nbytes
