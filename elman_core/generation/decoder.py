"""One more byte of every sample at a time, all of it on the device: the model's step, sampling, and where the bytes are kept.

On a GPU the step is recorded as one CUDA graph and replayed without waiting: bytes come back a burst at a time, while the next
burst is computed. What is computed beyond the end of a sample is dropped, so the bytes are those of the plain loop.

Shapes: B samples, V vocabulary, R places for results.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from elman_core.kernels.dense_native import check_errors
from elman_core.model import LadderCache, LadderForCausalLM, LadderStaticCache
from elman_core.model.graph import CudaRecorder, Recorder, Sent
from elman_core.registry import DivergedError

from .sampling import Sampling, sample

log = logging.getLogger("elman_core")

BURST = 16
"""Bytes of a sample between two looks of the host, where the step is a graph."""

WARM = 2
"""Steps before the recording, which compile and warm up what it uses."""

WORTH = 64
"""Bytes from which on recording pays."""


class Decoder:
    """Draws bytes from a model that has read a prompt.

    Args:
        model: in evaluation mode. cache: its state after the prompt, one row for each sample. logits_BV: of the next byte.
        seen_BV: bool, the bytes that have occurred; changed in place. how, generator: of the sampling.
        recorder: records the step; None runs it as it is.
    """

    def __init__(
        self,
        model: LadderForCausalLM,
        cache: LadderCache,
        logits_BV: Tensor,
        seen_BV: Tensor,
        how: Sampling,
        generator: torch.Generator,
        recorder: Recorder | None = None,
    ) -> None:
        self.model, self.how, self.generator, self.recorder = model, how, generator, recorder
        self.cache: LadderCache | LadderStaticCache = cache
        self.steps = 0
        self._replay: Callable[[], Tensor] | None = None
        rows, device = len(logits_BV), logits_BV.device
        with torch.inference_mode():
            if recorder is not None:
                self.cache = _at_fixed_addresses(cache)
            self.seen_BV = seen_BV.clone()
            self.next_B = torch.zeros(rows, dtype=torch.long, device=device)
            self.finite = torch.ones((), dtype=torch.bool, device=device)
            self.results_RB = torch.zeros(
                BURST, rows + 1, dtype=torch.long, device=device
            )  # and whether all was finite
            self.place_1 = torch.zeros(1, dtype=torch.long, device=device)
            self._choose(logits_BV)

    def bytes(self, budget: int) -> Iterator[list[int]]:
        """Rows of B bytes, in order, `budget` at most. Stop taking them when enough have come.

        Raises:
            DivergedError: logits that are not finite.
        """
        if not budget:
            return
        underway, asked = deque([self._fetched(1)]), 1  # the first bytes follow from the prompt
        while underway:
            if self._replay is not None and asked < budget:  # the device is not to wait for who reads
                underway.append(self._steps(min(BURST, budget - asked)))
                asked += underway[-1].count
            yield from underway.popleft().read()
            if not underway and asked < budget:
                underway.append(self._steps(1))
                asked += 1

    def _steps(self, count: int) -> _Fetched:
        """Draw `count` more bytes of every sample."""
        with torch.inference_mode(), self.recorder.work() if self.recorder is not None else nullcontext():
            self.place_1.zero_()
            for _ in range(count):
                self._step()
            return self._fetched(count)

    def _step(self) -> None:
        if self._replay is None and self.recorder is not None and self.steps >= WARM:
            try:
                self._replay = self.recorder.record(self._run, [self.generator])
            except RuntimeError as error:
                if isinstance(error, torch.cuda.OutOfMemoryError):
                    raise
                log.warning(
                    "elman: decoding is not captured as a CUDA graph, and runs eager: %s", str(error).splitlines()[0]
                )
                self.recorder = None
        self.steps += 1
        (self._replay or self._run)()

    def _run(self) -> Tensor:
        """What is recorded: feed the bytes drawn last, and draw the next."""
        out = self.model(input_ids=self.next_B[:, None], past_key_values=self.cache, use_cache=True)
        self._choose(out.logits[:, -1])
        return self.results_RB

    def _choose(self, logits_BV: Tensor) -> None:
        self.finite.logical_and_(logits_BV.isfinite().all())
        self.next_B.copy_(sample(logits_BV, self.how, self.seen_BV, self.generator))
        if self.how.repetition_penalty != 1.0:
            self.seen_BV.scatter_(1, self.next_B[:, None], True)
        row = torch.cat((self.next_B, self.finite[None].long()))
        self.results_RB.index_copy_(0, self.place_1, row[None])
        self.place_1.add_(1)

    def _fetched(self, count: int) -> _Fetched:
        return _Fetched(count, Sent.of(self.results_RB[:count]), self.results_RB.device)


@dataclass(frozen=True)
class _Fetched:
    """Results on their way to the host."""

    count: int
    rows: Sent
    device: torch.device

    def read(self) -> Iterator[list[int]]:
        for *row, finite in self.rows.read():
            if not finite:
                check_errors(self.device)  # a kernel that gave up leaves no number, and in a replay says it to nobody
                raise DivergedError(
                    "the model's logits are not finite: its weights have diverged, or 16 bits are too few for it"
                )
            yield row


def recorder_for(model: LadderForCausalLM, budget: int) -> Recorder | None:
    """What records the steps of a generation: a CUDA graph where that pays and the state has one size."""
    constant = all(block.mixer.state_growth == "constant" for block in model.model.layers)
    return CudaRecorder(model.device) if model.device.type == "cuda" and constant and budget >= WORTH else None


def _at_fixed_addresses(cache: LadderCache) -> LadderStaticCache:
    static = LadderStaticCache(num_blocks=len(cache.layers))
    for layer, state in zip(static.layers, cache.states, strict=True):
        if state is not None:
            layer.set(state, int(cache.get_seq_length()))
    return static
