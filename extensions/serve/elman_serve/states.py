"""States of running texts as rows of one batch, and states after prefixes of prompts.

A recurrent state has a constant size, so a slot is a row: nothing is paged, nothing fragments.

Shapes: P rows, V vocabulary.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from elman_core import LadderCache, LadderStaticCache, State
from elman_core.extension import SHORTEST, CpuRecorder, GraphedStep, batched_step, least_rows, recorder_for

Owner = TypeVar("Owner")
States = list[State]
Prompt = bytes | array  # type: ignore[type-arg]  # of a model of bytes, or of other tokens


def size_of(states: States) -> int:
    """Bytes of the tensors."""
    return sum(tensor.nbytes for state in states for tensor in state.values())


class Rows(Generic[Owner]):
    """The batch. Rows without an owner are computed and not looked at.

    On a CPU there are as many rows as owners, whose step a program repeats in memory for `slots`; without a program, the next
    multiple of `least_rows`. On a GPU there are always `slots`, in a static cache, so that a step is one CUDA graph.

    Attributes:
        owners: of each row, None for a free one.
    """

    def __init__(self, model: Any, slots: int) -> None:
        self.model, self._step, self.unit = model, model, least_rows(model)
        self.owners: list[Owner | None] = []
        self._states: States = []
        self._static: LadderStaticCache | None = None
        recorder = recorder_for(model)
        self._program = batched_step(model, recorder, slots) if isinstance(recorder, CpuRecorder) else None
        if self._program is not None:
            self.unit, self._states = 1, self._program.states
        elif recorder is not None and not isinstance(recorder, CpuRecorder):
            self._step, self.unit = GraphedStep(model, recorder), slots
            self._static = LadderStaticCache(num_blocks=len(model.model.layers))

    def live(self) -> list[int]:
        """The rows that have an owner."""
        return [row for row, owner in enumerate(self.owners) if owner is not None]

    def free(self, row: int) -> None:
        self.owners[row] = None

    def join(self, joining: list[tuple[Owner, States]]) -> None:
        """Add rows with the states (one row each) of new owners, and close gaps where that makes the batch smaller."""
        live = self.live()
        if self._program is not None:
            self._settle(live, joining)
            return
        rows = -(-(len(live) + len(joining)) // self.unit) * self.unit
        if not joining and rows == len(self.owners):
            return
        if not rows:
            if self._static is None:
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
        if self._static is not None:
            for layer, state in zip(self._static.layers, made, strict=True):
                layer.set(state, 0)  # copies into where the graph reads
            self._states = [state or {} for state in self._static.states]

    def _settle(self, live: list[int], joining: list[tuple[Owner, States]]) -> None:
        """The same in the memory of a program: the last rows fill gaps, and nothing else moves."""
        count = len(live) + len(joining)
        if count == len(self.owners) and not joining:
            return
        gaps = [row for row in range(count) if row >= len(self.owners) or self.owners[row] is None]
        late = [row for row in live if row >= count]
        moved, filled = gaps[: len(late)], gaps[len(late) :]
        owners = {row: self.owners[row] for row in live} | dict(
            zip(moved, (self.owners[row] for row in late), strict=True)
        )
        owners |= {row: owner for row, (owner, _) in zip(filled, joining, strict=True)}
        self.owners = [owners[row] for row in range(count)]
        for branch, state in enumerate(self._states):
            for name, tensor in state.items():
                if late:
                    tensor[moved] = tensor[late]
                if joining:
                    tensor[filled] = torch.cat([states[branch][name] for _, states in joining])

    def step(self, tokens: list[int]) -> Tensor:
        """Feed one token to every row; the logits (P, V) of what follows, which the next step may overwrite."""
        if self._program is not None:
            self._program.tokens_R1[: len(tokens), 0] = torch.tensor(tokens)
            return self._program.run(len(tokens))
        cache = LadderCache.from_states(self._states) if self._static is None else self._static
        tokens_P1 = torch.tensor(tokens, device=self.model.device)[:, None]
        logits_PV: Tensor = self._step(input_ids=tokens_P1, past_key_values=cache, use_cache=True).logits[:, -1]
        self._states = [state or {} for state in cache.states]
        return logits_PV


def kind(model: Any, length: int) -> int:
    """The same for lengths of pieces that may be padded to the longest: kernels of a CPU run for all of them, or for none."""
    least = least_rows(model)
    return max(-(-length // least) * least, SHORTEST - 1).bit_length()


def read(
    model: Any, pieces: Sequence[Sequence[int]], states: list[States], every: bool = False
) -> tuple[list[States], list[Tensor]]:
    """Read a piece of each of several texts at once: the states after each, and the logits (1, V) of what follows it.

    Args:
        pieces: tokens, not empty. states: before each piece, one row each; all empty at the start of texts.
        every: also return the logits behind every token of a piece: (tokens, V).
    """
    device, count = model.device, len(pieces)
    if device.type != "cpu":  # kernels are settled for each number of rows: powers of two are few
        spare = (1 << (count - 1).bit_length()) - count
        pieces, states = [*pieces, *[pieces[0]] * spare], [*states, *[states[0]] * spare]
    lengths = [len(piece) for piece in pieces]
    most = -(-max(lengths) // least_rows(model)) * least_rows(model)
    tokens_RT = torch.tensor([[*piece, *[0] * (most - len(piece))] for piece in pieces], device=device)
    mask_RT = torch.tensor(lengths, device=device)[:, None] > torch.arange(most, device=device)
    ends = list(range(most)) if every else sorted({length - 1 for length in lengths})
    branches = [
        {name: torch.cat([state[branch][name] for state in states]) for name in states[0][branch]}
        for branch in range(len(states[0]))
    ]
    cache = LadderCache.from_states(branches or [None] * len(model.model.layers))
    given = {"attention_mask": None if min(lengths) == most else mask_RT, "past_key_values": cache, "use_cache": True}
    logits_REV: Tensor = model(input_ids=tokens_RT, logits_to_keep=torch.tensor(ends, device=device), **given).logits
    after = [[{n: t[row : row + 1] for n, t in (s or {}).items()} for s in cache.states] for row in range(count)]
    places = [
        slice(length) if every else slice(ends.index(length - 1), ends.index(length - 1) + 1) for length in lengths
    ]
    return after, [logits_EV[place] for logits_EV, place in zip(logits_REV[:count], places[:count], strict=True)]


@torch.inference_mode()
def independent(model: Any, slots: int) -> tuple[bool, bool]:
    """Whether a row gets the same bits in the smallest and in the largest batch: of a step, and of texts that are read.

    A step, and two pieces of texts of several lengths, show it.
    """
    text = [token % model.config.vocab_size for token in range(2 * 256)]
    texts = [text[7 * row :][:length] for row, length in enumerate((23, 1, 5, 15, 16, 63, 40, 100, 64))]

    def after(texts: list[list[int]]) -> list[list[Tensor]]:
        """What is computed of each, read twice."""
        states, _ = read(model, texts, [[] for _ in texts])
        states, logits = read(model, texts, states)
        return [[own, *(t for s in each for t in s.values())] for own, each in zip(logits, states, strict=True)]

    def logits(chosen: range) -> Tensor:
        batch: Rows[int] = Rows(model, slots)
        batch.join([(row, begun[row % len(begun)]) for row in chosen])
        return batch.step([text[row % 256] for row in chosen])

    begun = [read(model, [each], [[]])[0][0] for each in texts[:4]]
    unit = Rows[int](model, slots).unit
    count = -(-slots // unit) * unit
    whole_PV, ends = logits(range(count)), (range(unit), range(count - unit, count))
    steps = all(torch.equal(logits(end), whole_PV[end.start : end.stop]) for end in ends)
    kinds: dict[int, list[list[int]]] = {}
    for each in texts:
        kinds.setdefault(kind(model, len(each)), []).append(each)
    same = (
        all(map(torch.equal, one, after([each])[0]))
        for group in kinds.values()
        for each, one in zip(group, after(group), strict=True)
    )
    return steps, all(same)


class Prefixes:
    """States after prefixes of prompts and the logits there, the least recently used thrown away first.

    A prompt is read in pieces of `piece` tokens; a state is kept after each, and after the last token. A text continues only
    from where its own pieces would end, so it gets the same bits as if it were read from its start.

    Args:
        most: bytes to keep at most; 0 keeps nothing. piece: tokens.

    Attributes:
        bytes: kept now.
    """

    def __init__(self, most: int, piece: int) -> None:
        self.most, self.piece, self.bytes = most, piece, 0
        self._kept: OrderedDict[bytes, tuple[States, Tensor]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def _keys(self, text: Prompt) -> Iterator[tuple[int, bytes]]:
        digest = hashlib.sha256()
        for start in range(0, len(text), self.piece):
            digest.update(text[start : start + self.piece])
            yield min(start + self.piece, len(text)), digest.digest()

    def find(self, text: Prompt) -> tuple[int, States, Tensor] | None:
        """(tokens, states, logits (1, V)) of the longest prefix that is kept; None if none is."""
        if not self._kept:
            return None
        for length, key in reversed(list(self._keys(text))):
            if key in self._kept:
                self._kept.move_to_end(key)
                return length, *self._kept[key]
        return None

    def keep(self, text: Prompt, states: Iterable[State | None], logits_1V: Tensor) -> None:
        """Keep copies of the states after `text`, which share no memory with a longer piece."""
        copies = [{name: tensor.clone() for name, tensor in (state or {}).items()} for state in states]
        key = hashlib.sha256(text).digest()
        if key not in self._kept:
            self._kept[key] = (copies, logits_1V.clone())
            self.bytes += size_of(copies) + logits_1V.nbytes
        while self.bytes > self.most:
            _, (old, logits) = self._kept.popitem(last=False)
            self.bytes -= size_of(old) + logits.nbytes
