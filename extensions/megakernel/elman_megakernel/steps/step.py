"""The step of a model on a CPU as a program, recorded once for all texts and all numbers of samples.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from elman_core import LadderCache, LadderForCausalLM, State
from elman_core.extension import scaled_once

from .program import Program
from .rows import Batch, Recorded, RowsProgram

log = logging.getLogger("elman_core")
Record = Callable[[Callable[[], Tensor]], Program]
_OF_USE = {"_held", "_holders", "_started"}  # what a `ComputedWeight` knows of its uses
_known: WeakKeyDictionary[LadderForCausalLM, tuple[Any, RowsProgram, list[list[str]]]] = WeakKeyDictionary()


class BatchedStep:
    """The step of a model with its present weights for up to `most` rows, in memory of its own.

    Attributes:
        tokens_R1: int64, to be fed. states: of each layer, before the step and then after it. logits_RV: of what follows.

    Raises:
        RuntimeError: it cannot be recorded.
    """

    def __init__(self, model: LadderForCausalLM, record: Record, most: int) -> None:
        key = fingerprint(model)
        with torch.inference_mode(), scaled_once(model):
            if model not in _known or _known[model][0] != key:
                (two, names), (three, _) = (_recorded(model, record, rows) for rows in (2, 3))
                _known[model] = key, RowsProgram(two, three), names
            _, program, names = _known[model]
            self._batch = Batch(program, most)
        self.tokens_R1, self.logits_RV, *rest = self._batch.given
        self.states: list[State] = [{name: rest.pop(0) for name in each} for each in names]

    def run(self, rows: int) -> Tensor:
        """Advance the first rows; their logits (rows, V), which the next call overwrites."""
        self._batch.run(rows)
        return self.logits_RV[:rows]


def batched_step(model: LadderForCausalLM, record: Record, most: int) -> BatchedStep | None:
    """The step of a model; None, with a line, if it cannot be recorded."""
    try:
        return BatchedStep(model, record, most)
    except RuntimeError as error:
        log.warning("elman: a step of decoding cannot be recorded, runs eager: %s", str(error).splitlines()[0])
        return None


def _sums(tensors: Sequence[Tensor]) -> list[int]:
    return [zlib.crc32(x.reshape(-1).view(torch.uint8).numpy().data) for x in tensors]


def fingerprint(model: LadderForCausalLM, sums: Callable[[Sequence[Tensor]], list[int]] = _sums) -> Any:
    """The `sums` of the bits of all weights, as a write to `.data` leaves no other trace, and what modules say of themselves,
    such as which adapters are on."""
    weights = [x.detach() for x in (*model.parameters(), *model.buffers())]
    said = [{name: x for name, x in vars(m).items() if name not in _OF_USE} for m in model.modules()]
    known = [(x.data_ptr(), x.dtype, found) for x, found in zip(weights, sums(weights), strict=True)]
    return known, json.dumps(said, default=lambda x: str(type(x)), skipkeys=True)


def _recorded(model: LadderForCausalLM, record: Record, rows: int) -> tuple[Recorded, list[list[str]]]:
    """A step of so many rows, each behind another token, and the names of the states of each layer."""
    tokens_R1 = torch.arange(rows)[:, None] % model.config.vocab_size
    cache = LadderCache(num_blocks=len(model.model.layers))
    logits_RV = model(input_ids=tokens_R1, past_key_values=cache, use_cache=True).logits[:, -1].clone()
    states = [{name: x.clone() for name, x in (state or {}).items()} for state in cache.states]

    def run() -> Tensor:
        cache = LadderCache.from_states([{**state} for state in states])
        logits_R1V = model(input_ids=tokens_R1, past_key_values=cache, use_cache=True).logits
        news = [
            (state[name], x) for state, new in zip(states, cache.states, strict=True) for name, x in (new or {}).items()
        ]
        for old, new in news:
            old.copy_(new)
        return logits_RV.copy_(logits_R1V[:, -1])

    given = [tokens_R1, logits_RV, *(x for state in states for x in state.values())]
    return Recorded(record(run), given), [[*state] for state in states]
