"""States of running texts as rows of one batch, and states after prefixes of prompts.

A recurrent state has a constant size, so a slot is a row: nothing is paged, nothing fragments.

Shapes: P rows, T steps, V vocabulary.
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from elman_core import LadderCache, LadderStaticCache, State
from elman_core.extension import (
    SHORTEST,
    GraphedStep,
    HostCopy,
    Recorder,
    Sampling,
    StepRecorder,
    choose,
    least_rows,
    noise,
    recorder_for,
    try_to_record,
)

log = logging.getLogger("elman_core")
GRAPHS = 4
"""Of settings, so many are recorded at a time."""

Owner = TypeVar("Owner")
States = list[State]
Prompt = bytes | array  # type: ignore[type-arg]  # of a model of bytes, or of other tokens


def size_of(states: States) -> int:
    """Bytes of the tensors."""
    return sum(tensor.nbytes for state in states for tensor in state.values())


class Rows(Generic[Owner]):
    """The batch. Rows without an owner are computed and not looked at.

    On a CPU there are as many rows as owners, whose step a program repeats in memory for `slots`; without a program, the next
    multiple of `least_rows`. On a GPU there are always `slots`, in a static cache, so that a step is one CUDA graph,
    and a few steps with their draws another.

    Attributes:
        owners: of each row, None for a free one. ahead: whether draws may begin before the last ones are read, on a GPU.
    """

    def __init__(self, model: Any, slots: int) -> None:
        self.model, self._step, self.unit = model, model, least_rows(model)
        self.owners: list[Owner | None] = []
        self._states: States = []
        self._recorder: Recorder | None = None
        self._recorded: dict[Sampling, Callable[[], Tensor] | None] = {}  # last used last; None: run once
        self._told_3P = torch.zeros(3, 0, dtype=torch.long, device=model.device)
        self._seen = torch.zeros(0, dtype=torch.bool, device=model.device)  # for a penalty, which no text has
        self._static: LadderStaticCache | None = None
        recorder = recorder_for(model)
        self._program = recorder.step_of(model, slots) if isinstance(recorder, StepRecorder) else None
        if self._program is not None:
            self.unit, self._states = 1, self._program.states
        elif recorder is not None and not isinstance(recorder, StepRecorder):
            self._step, self.unit, self._recorder = GraphedStep(model, recorder), slots, recorder
            self._told_3P = self._told_3P.new_zeros(3, slots)
            self._drawn_TP = self._told_3P.new_zeros(recorder.burst, slots)
            self._static = LadderStaticCache(num_blocks=len(model.model.layers))
        self.ahead = self._recorder is not None

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

    def step(self, tokens_P: Tensor) -> Tensor:
        """Feed one token to every row; the logits (P, V) of what follows, which the next step may overwrite."""
        if self._program is not None:
            self._program.tokens_R1[: len(tokens_P), 0] = tokens_P
            return self._program.run(len(tokens_P))
        cache = LadderCache.from_states(self._states) if self._static is None else self._static
        tokens_P1 = tokens_P.to(self.model.device)[:, None]
        logits_PV: Tensor = self._step(input_ids=tokens_P1, past_key_values=cache, use_cache=True).logits[:, -1]
        self._states = [state or {} for state in cache.states]
        return logits_PV

    def draw(self, told: list[tuple[int, int, int]] | None, how: Sampling, count: int) -> list[HostCopy]:
        """Feed a token to every row and draw the next, `count` times or more: (steps, P), -1 where logits are not finite.

        Args:
            told: of each row, its last token, the key of its noise and the number of the token to draw; None, if `ahead`: those
                where the last draw ends. how: without a penalty.
        """
        told_3P = self._told_3P if told is None else torch.tensor(told).T.contiguous()
        if self._recorder is not None:
            if told is not None:
                self._told_3P.copy_(told_3P)
            return [HostCopy.of(self._burst(how)) for _ in range(-(-count // self._recorder.burst))]
        rows = told_3P.shape[1]
        drawn_TP = told_3P.new_empty(count, rows)
        block = max(1, (1 << 16) // (rows * self.model.config.vocab_size))  # of noise, which fits in a cache
        for part_TP in drawn_TP.split(block):
            self._draw(self.step, told_3P, how, part_TP)
        return [HostCopy(drawn_TP)]

    def _draw(self, step: Callable[[Tensor], Tensor], told_3P: Tensor, how: Sampling, drawn_TP: Tensor) -> Tensor:
        """Fill `drawn_TP` by steps; `told_3P` is then that of the next."""
        next_P, keys_P, numbers_P = told_3P
        waits: Sequence[Tensor | None] = [None] * len(drawn_TP)
        if how.temperature:
            ahead_T1 = torch.arange(len(drawn_TP), device=keys_P.device)[:, None]
            waits = noise(keys_P, numbers_P + ahead_T1, self.model.config.vocab_size).unbind(0)
        for waits_PV, row_P in zip(waits, drawn_TP, strict=True):
            choose(step(next_P), how, self._seen, waits_PV, next_P, row_P)
        numbers_P += len(drawn_TP)
        return drawn_TP

    def _burst(self, how: Sampling) -> Tensor:
        """Several steps on a GPU, as a graph from the second time on."""
        recorder, static = self._recorder, self._static
        assert recorder is not None
        assert static is not None

        def run() -> Tensor:
            cache = LadderCache.from_states(self._states)

            def step(tokens_P: Tensor) -> Tensor:
                return self.model(input_ids=tokens_P[:, None], past_key_values=cache, use_cache=True).logits[:, -1]

            self._draw(step, self._told_3P, how, self._drawn_TP)
            for layer, state in zip(static.layers, cache.states, strict=True):
                layer.set(state or {}, 0)
            return self._drawn_TP

        if how not in self._recorded:
            self._recorded[how] = None
            if len(self._recorded) > GRAPHS:
                del self._recorded[next(iter(self._recorded))]
            with recorder.work():
                return run()
        replay = self._recorded.pop(how)
        if replay is None:
            with recorder.work():
                made = try_to_record(recorder, run)
            if isinstance(made, RuntimeError):
                log.warning("elman: steps of texts cannot be recorded, run eager: %s", str(made).splitlines()[0])
            replay = run if isinstance(made, RuntimeError) else made
        self._recorded[how] = replay
        return replay()


def kind(model: Any, length: int) -> int:
    """The same for lengths of pieces that may be padded to the longest: kernels of a CPU run for all of them, or for none."""
    least = least_rows(model)
    return max(-(-length // least) * least, SHORTEST - 1).bit_length()


def read(
    model: Any, pieces: Sequence[Sequence[int]], states: list[States], every: bool = False
) -> tuple[list[States], list[Tensor]]:
    """Read a piece of each of several texts at once: states after each and logits (1, V) of what follows, in memory of
    their own.

    Args:
        pieces: tokens, not empty. states: before each piece, one row each; all empty at the start of texts.
        every: return the logits behind every token of a piece: (tokens, V), which may share memory.
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
    apart = [{name: _apart(tensor, count) for name, tensor in (state or {}).items()} for state in cache.states]
    after = [[{name: rows[row] for name, rows in state.items()} for state in apart] for row in range(count)]
    if every:
        return after, [logits_TV[:length] for logits_TV, length in zip(logits_REV[:count], lengths, strict=False)]
    last_RV = logits_REV[range(count), [ends.index(length - 1) for length in lengths[:count]]]
    return after, _apart(last_RV, count)


def _apart(tensor: Tensor, count: int) -> list[Tensor]:
    """The first rows, each in memory of its own: (1, …)."""
    split: Any = torch.split_with_sizes_copy  # torch's stub says that it returns nothing
    return list(split(tensor[:count], [1] * count))


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
        return batch.step(torch.tensor([text[row % 256] for row in chosen]))

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
        most: bytes to keep at most; 0, or less than those of one state, keeps nothing. piece: tokens.

    Attributes:
        bytes: kept now.
    """

    def __init__(self, most: int, piece: int) -> None:
        self.most, self.piece, self.bytes = most, piece, 0
        self._kept: OrderedDict[bytes, tuple[States, Tensor]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def keys(self, text: Prompt) -> list[bytes]:
        """A digest of `text` up to the end of each piece."""
        digest, made = hashlib.sha256(), []
        for start in range(0, len(text), self.piece):
            digest.update(text[start : start + self.piece])
            made.append(digest.digest())
        return made

    def find(self, keys: list[bytes]) -> tuple[int, States, Tensor] | None:
        """(pieces, states, logits (1, V)) of the longest prefix of a text with these keys that is kept; None if none is."""
        for pieces in range(len(keys), 0, -1):
            key = keys[pieces - 1]
            if key in self._kept:
                self._kept.move_to_end(key)
                return pieces, *self._kept[key]
        return None

    def keep(self, key: bytes, states: States, logits_1V: Tensor) -> None:
        """Keep the states after the text of this key, whose memory holds nothing else."""
        if key not in self._kept:
            self._kept[key] = (states, logits_1V)
            size = size_of(states) + logits_1V.nbytes
            self.bytes += size
            if size > self.most:  # all have this size: nothing is ever kept, for which another text could wait
                self.most = 0
        while self.bytes > self.most:
            _, (old, logits) = self._kept.popitem(last=False)
            self.bytes -= size_of(old) + logits.nbytes
