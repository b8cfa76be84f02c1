"""Decodes one byte of every sample per step, entirely on the device: the model's step, sampling, and storage of the bytes.

On a GPU, several steps are recorded as one CUDA graph and replayed without waiting: the bytes of a burst arrive while the next
burst is computed. Inside a burst, the state passes from step to step without a copy; once per burst, it is copied back to where
the graph reads it. Bytes beyond the end of a sample are dropped, so the bytes equal those of the plain loop. On a CPU, an
extension repeats the model's step and the draw.

Shapes: B samples, V vocabulary, R places for results.
"""

from __future__ import annotations

import functools
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from elman_core.kernels.dense.native import check_errors
from elman_core.kernels.runtime import CPU_DTYPES, mode, warn
from elman_core.model import LadderCache, LadderForCausalLM, LadderStaticCache, step_graph
from elman_core.model.graph import WARM, HostCopy, Recorder, try_to_record
from elman_core.model.rollback import map_state
from elman_core.registry import ConfigError, DivergedError, KernelError, PluginError, State
from elman_core.registry.extensions import extensions, load_extension

from .sampling import Noise, Sampling, choose, keys_of

log = logging.getLogger("elman_core")

LAUNCHED = 32
"""Bytes that a program draws in a launch."""

WORTH = 64
"""Recording a graph, or compiling what repeats a step on a CPU, pays from this number of bytes on."""


class Run(Protocol):
    """A text under way, whose state and last token its program keeps."""

    def draw(self, shown_T: Tensor, waits_TV: Tensor | None, seen_V: Tensor, **sampling: Any) -> None:
        """Feed the last token and draw T more into `shown_T`, on the current stream; -1 for logits that are not finite."""


class Program(Protocol):
    """Decodes several bytes of one sample in a launch, as an entry point in `elman.programs` makes it of a model."""

    def begin(self, states: Sequence[State | None], token_B: Tensor) -> Run:
        """A text that goes on from these states of the layers and this token."""


class Step(Protocol):
    """A model's step with its present weights for up to so many rows, in memory of its own.

    Attributes:
        tokens_R1: int64, to be fed. states: of each layer, before the step and then after it. logits_RV: of what follows.
    """

    tokens_R1: Tensor  # noqa: N815
    states: list[State]
    logits_RV: Tensor  # noqa: N815

    def run(self, rows: int) -> Tensor:
        """Advance the first rows; their logits (rows, V), which the next call overwrites."""


@runtime_checkable
class StepRecorder(Recorder, Protocol):
    """A recorder for a CPU, as the entry point `steps` in `elman.programs` makes it."""

    def step_of(self, model: LadderForCausalLM, most: int) -> Step | None:
        """The step of a model for up to `most` rows; None, with a line, if it cannot be recorded."""


class Decoder:
    """Draws bytes from a model that has read a prompt.

    Args:
        model: in evaluation mode. cache: its state after the prompt, one row for each sample. logits_BV: of the next byte.
        seen_BV: bool, the bytes that have occurred; changed in place. how, seed: of the sampling.
        recorder: records the step; None runs it as it is.
        padding: rows of the cache behind those of the samples, computed beside them and dropped.
        program: of the model, which takes the place of its steps.
    """

    def __init__(
        self,
        model: LadderForCausalLM,
        cache: LadderCache | LadderStaticCache,
        logits_BV: Tensor,
        seen_BV: Tensor,
        how: Sampling,
        seed: int,
        recorder: Recorder | None = None,
        padding: int = 0,
        program: Program | None = None,
    ) -> None:
        self.model, self.how, self.recorder = model, how, recorder
        self.cache, self.padding = cache, padding
        self.steps = 0
        self.drawn = 0
        self._replay: Callable[[], Tensor] | None = None
        self._states: list[State] = []  # where the graph reads and leaves the state: it keeps addresses, not tensors
        rows, device = len(logits_BV), logits_BV.device
        with torch.inference_mode():
            self.seen_BV = seen_BV.clone()
            self.next_B = torch.zeros(rows, dtype=torch.long, device=device)
            steps = 1 if recorder is None else recorder.burst
            self.results_RB = torch.zeros(steps, rows, dtype=torch.long, device=device)
            self._noise = None
            if how.temperature:
                self._noise = Noise(keys_of(seed, rows, device), seen_BV.shape[1])
                self._waits_RBV = torch.empty(steps, *seen_BV.shape, device=device)
            self._await()
            self._choose(logits_BV, 0)
            self.drawn = 1
            self._run = None if program is None else program.begin(cache.states, self.next_B)
            self._shown_T = torch.zeros(LAUNCHED, dtype=torch.long, device=device)

    def bytes(self, budget: int) -> Iterator[list[int]]:
        """Rows of B bytes, in order, `budget` at most. Stop taking them when enough have come. Raises `DivergedError` for
        logits that are not finite."""
        if not budget:
            return
        underway = deque([HostCopy.of(self.results_RB[:1])])  # the first bytes follow from the prompt
        asked = 1
        while True:
            # What is recorded runs ahead, so that the device is busy while the host reads.
            while asked < budget and len(underway) < (1 if self._replay is None and self._run is None else 2):
                underway.append(self._more(budget - asked))
                asked += len(underway[-1].values)
            if not underway:
                return
            for row in underway.popleft().read():
                if min(row) < 0:
                    check_errors(self.next_B.device)  # a kernel that gave up leaves NaN, and a replay reports no error
                    raise DivergedError(
                        "the model's logits are not finite: its weights have diverged, or 16-bit weights are too coarse for it"
                    )
                yield row

    def _more(self, wanted: int) -> HostCopy:
        """Draw the next byte of every sample, or a burst of them where that is recorded, or many where there is a program."""
        if self._run is not None:
            return self._launch(self._run, min(LAUNCHED, wanted))
        with torch.inference_mode(), self.recorder.work() if self.recorder is not None else nullcontext():
            self._await()
            if self._replay is None and isinstance(self.recorder, StepRecorder):
                self._repeat(self.recorder)
            elif self._replay is None and self.recorder is not None and self.steps >= WARM:
                self._record(self.recorder)
            self.steps += 1
            if self._replay is None:
                self._step(self.cache, 0)
                self.drawn += 1
                return HostCopy.of(self.results_RB[:1])
            self._replay()
            self.drawn += len(self.results_RB)
            return HostCopy.of(self.results_RB[:wanted])

    def _launch(self, run: Run, count: int) -> HostCopy:
        """Draw `count` bytes of the one sample in a launch."""
        with torch.inference_mode():
            waits_TV = None if self._noise is None else self._noise.of(self.drawn, count)[:, 0]
            self.drawn += count
            run.draw(self._shown_T[:count], waits_TV, self.seen_BV[0], **self.how.settings)
            return HostCopy.of(self._shown_T[:count, None])

    def _record(self, recorder: Recorder) -> None:
        states = [map_state(torch.clone, state) or {} for state in self.cache.states]
        recording = try_to_record(recorder, lambda: self._burst(states))
        if isinstance(recording, RuntimeError):
            log.warning("elman: a step of decoding cannot be recorded, runs eager: %s", str(recording).splitlines()[0])
            self.recorder = None
        else:
            self._replay, self._states = recording, states

    def _repeat(self, recorder: StepRecorder) -> None:
        """Go on with the model's program, which does not depend on this text, and a recorded draw."""
        rows = len(self.next_B)
        step = recorder.step_of(self.model, rows)
        if step is None:
            self.recorder = None
            return
        for mine, state in zip(step.states, self.cache.states, strict=True):
            for name, tensor in (state or {}).items():
                mine[name].copy_(tensor[:rows])
        step.tokens_R1[:, 0] = self.next_B
        self.next_B = step.tokens_R1[:, 0]

        def drawn() -> Tensor:
            self._choose(step.logits_RV, 0)
            return self.results_RB

        draw = recorder.record(drawn)

        def both() -> Tensor:
            step.run(rows)
            return draw()

        self._replay = both

    def _burst(self, states: list[State]) -> Tensor:
        """Run a burst of steps, from `states` and back to them: the work that is recorded."""
        cache = LadderCache.from_states(states)
        for place in range(len(self.results_RB)):
            self._step(cache, place)
        olds, news = [], []
        for old, new in zip(states, cache.states, strict=True):
            for name, tensor in (new or {}).items():
                olds.append(old[name])
                news.append(tensor)
        if olds:
            torch._foreach_copy_(olds, news)
        return self.results_RB

    def _step(self, cache: LadderCache | LadderStaticCache, place: int) -> None:
        """Feed the bytes drawn last, and draw the next, into this row of the results."""
        tokens_B = F.pad(self.next_B, (0, self.padding)) if self.padding else self.next_B
        out = self.model(input_ids=tokens_B[:, None], past_key_values=cache, use_cache=True)
        self._choose(out.logits[: len(self.next_B), -1], place)

    def _choose(self, logits_BV: Tensor, place: int) -> None:
        waits_BV = None if self._noise is None else self._waits_RBV[place]
        choose(logits_BV, self.how, self.seen_BV, waits_BV, self.next_B, self.results_RB[place])

    def _await(self) -> None:
        """Put the noise of the next draws where they read it."""
        if self._noise is not None:
            self._waits_RBV.copy_(self._noise.of(self.drawn, len(self._waits_RBV)))


def recorder_for(model: LadderForCausalLM, budget: int | None = None) -> Recorder | None:
    """The recorder of a generation's steps, if one is possible and worth it; otherwise None.

    A CUDA graph on a GPU; on a CPU that of an extension, once what repeats steps is compiled, beside the first long texts.
    `budget`: bytes of the text; None for a server, which waits until it is compiled. Raises `KernelError` if a CPU has none,
    with ELMAN_KERNELS=require.
    """
    worth = budget is None or budget >= WORTH
    if model.device.type != "cpu":
        return step_graph.recorder_for(model) if worth else None
    fits = step_graph.has_one_size(model) and all(p.dtype in CPU_DTYPES for p in model.parameters())
    if mode() == "off" or not fits or step_graph.is_watched(model):
        return None
    found = _steps()
    if not isinstance(found, KernelError):
        return found(worth, budget is None)
    if worth:
        warn("decoding on a CPU", found)
    return None


@functools.cache
def _steps() -> Callable[[bool, bool], StepRecorder | None] | KernelError:
    """What an extension has for a CPU, called with whether a text is worth compiling and whether to wait; or why none has."""
    try:
        return load_extension("programs", "steps")
    except (ConfigError, PluginError) as error:
        return KernelError(str(error))


@functools.cache
def _programs(asked: bool) -> Callable[[LadderForCausalLM, int], Program | None]:
    """What makes programs: an extension, if there is one; a line says that it is broken, or missing where it is asked for."""
    try:
        if asked or "whole" in extensions("programs"):
            return load_extension("programs", "whole")
    except (ConfigError, PluginError) as error:  # steps write the text without it
        log.warning("elman: models are decoded step by step, not by one launch: %s", error)
    return lambda *_: None


def program_for(model: LadderForCausalLM, budget: int) -> Program | None:
    """The program that an extension has for a model on a GPU and a text of so many bytes, unless ELMAN_WHOLE is "off".
    Raises `ConfigError` if that is none of auto, on and off."""
    way = os.environ.get("ELMAN_WHOLE", "auto")
    if way not in ("auto", "on", "off"):
        raise ConfigError(f"ELMAN_WHOLE must be auto, on or off, not {way!r}")
    if way == "off" or model.device.type == "cpu":
        return None
    make = _programs(way == "on")
    return make(model, budget)


def decode(
    model: LadderForCausalLM,
    cache: LadderCache | LadderStaticCache,
    logits_BV: Tensor,
    seen_BV: Tensor,
    how: Sampling,
    seed: int,
    budget: int,
    padding: int = 0,
) -> Iterator[list[int]]:
    """The bytes of a `Decoder` with the recorder and the program that this model and this budget have."""
    recorder = recorder_for(model, budget)
    program = program_for(model, budget) if recorder is not None and len(logits_BV) == 1 else None
    return Decoder(model, cache, logits_BV, seen_BV, how, seed, recorder, padding, program).bytes(budget)
