"""The decoding loop: a thread that writes the texts of all requests, one byte of each a step.

Requests join and leave at any byte. Prompts are read in pieces between the steps. Every text is the one that `elman generate`
writes for its prompt, settings and seed: it gets the same sums (see `least_rows`) and the same random numbers.

Shapes: R rows of a draw, n texts of a request, T bytes, V vocabulary.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from elman_core import LadderCache
from elman_core.extension import (
    ConfigError,
    DivergedError,
    ElmanError,
    Sampling,
    kept_scores,
    prefill,
    prefill_chunk,
    race,
    scaled_once,
)

from .metrics import Metrics
from .states import Prefixes, Rows, States


class Score(NamedTuple):
    """A byte, the natural logarithm of its probability (None for a prompt's first), and the likeliest bytes with theirs."""

    byte: int
    logprob: float | None
    top: list[tuple[int, float]]


class BusyError(ElmanError):
    """The queue is full, or the server is ending."""


class LateError(ElmanError):
    """The time of a request is over."""


@dataclass(eq=False)
class Text:
    """One text of a request. Only the engine changes it; others may read it at any time, `finish` before `shown`.

    Attributes:
        text: bytes so far. shown: how many of them no stop string can take back. drawn: bytes drawn, the end excepted.
        finish: "stop" or "length" when it is complete. scores: of `text`, if asked for.
    """

    request: Request
    index: int
    text: bytearray = field(default_factory=bytearray)
    shown: int = 0
    drawn: int = 0
    finish: str | None = None
    scores: list[Score] = field(default_factory=list)
    seen: Tensor | None = None

    def take(self, byte: int, ends: set[int]) -> None:
        """Append a byte that was drawn, or end the text."""
        if byte in ends:
            self.shown, self.finish = len(self.text), "stop"
            return
        self.text.append(byte)
        self.drawn += 1
        stops = self.request.stops
        if stop := next((stop for stop in stops if self.text.endswith(stop)), None):
            self.shown = len(self.text) - len(stop)
            self.finish = "stop"
        elif self.drawn == self.request.most:
            self.shown, self.finish = len(self.text), "length"
        else:
            self.shown = len(self.text) - max((_begun(self.text, stop) for stop in stops), default=0)


def _begun(text: bytearray, stop: bytes) -> int:
    """How many bytes at the end of `text` may become `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


@dataclass(eq=False)
class Request:
    """A prompt to continue `count` times.

    Attributes:
        prompt: not empty. most: bytes of each text at most; 0 only reads the prompt. stops: not empty each.
        seed: as of `elman generate`; None for a new one. tops: likeliest bytes to report for each byte; None reports nothing.
        scored: report the bytes of the prompt too. seconds: from now on, until it is given up.
        changed: its `set()` is called when there is something new.
    """

    prompt: bytes
    how: Sampling
    most: int
    changed: Any
    count: int = 1
    stops: tuple[bytes, ...] = ()
    seed: int | None = None
    tops: int | None = None
    scored: bool = False
    seconds: float = 600.0
    reused: int = 0
    prompt_scores: list[Score] = field(default_factory=list)
    error: Exception | None = None
    cancelled: bool = False

    def __post_init__(self) -> None:
        self.texts = [Text(self, index) for index in range(self.count)]
        self.arrived = time.monotonic()
        self.generator: torch.Generator | None = None

    @property
    def done(self) -> bool:
        return self.error is not None or all(text.finish is not None for text in self.texts)

    def cancel(self) -> None:
        """Nobody waits for it any more: its slots are free from the next step on."""
        self.cancelled = True


class _Reading(NamedTuple):
    request: Request
    position: int
    cache: LadderCache
    logits: Tensor | None


class Engine(threading.Thread):
    """Writes the texts of requests.

    Args:
        model: in evaluation mode; its states have a constant size and its vocabulary is 256 bytes.
        ends: bytes that end a text. slots: texts that are written at once. queue: requests that wait at most.
        prefix_bytes: states of prefixes kept at most, in bytes.
        notify: called in this thread with the `changed` of requests that have something new, after each step.

    Raises:
        ConfigError: a model that cannot be served.
    """

    def __init__(
        self,
        model: Any,
        ends: set[int],
        *,
        slots: int,
        queue: int,
        prefix_bytes: int,
        notify: Callable[[list[Any]], None],
    ) -> None:
        super().__init__(name="decode", daemon=True)
        if model.config.vocab_size != 256:
            raise ConfigError(f"this model has {model.config.vocab_size} tokens; models of 256 bytes can be served")
        if any(block.mixer.state_growth != "constant" for block in model.model.layers):
            raise ConfigError("the state of this model grows with the text: only states of constant size can be served")
        self.model, self.ends, self.slots, self.most_waiting, self.notify = model, ends, slots, queue, notify
        self.metrics, self.closing = Metrics(), False
        self.failure: Exception | None = None
        self.piece = prefill_chunk(model.device)
        self.prefixes = Prefixes(prefix_bytes, self.piece)
        self._rows: Rows[Text] = Rows(model)
        self._reading: _Reading | None = None
        self._queue: deque[Request] = deque()
        self._condition = threading.Condition()

    def submit(self, *requests: Request) -> None:
        """Queue requests, all or none.

        Raises:
            BusyError: the queue is full, or the engine is closing.
        """
        with self._condition:
            if self.closing or self.failure:
                raise BusyError("the server is ending")
            if len(self._queue) + len(requests) > self.most_waiting:
                raise BusyError(f"{len(self._queue)} prompts are waiting already; try again later")
            self._queue.extend(requests)
            self._condition.notify()

    def close(self) -> None:
        """Refuse new requests; the thread ends when those that it has are done."""
        with self._condition:
            self.closing = True
            self._condition.notify()

    def run(self) -> None:
        try:
            with torch.inference_mode(), scaled_once(self.model):
                while self._wait():
                    self._turn()
        except (
            Exception
        ) as error:  # whatever a model raises: all requests are told, and whoever started the thread looks
            self.failure = error
            with self._condition:
                lost = [*self._queue, *([self._reading.request] if self._reading else [])]
            lost += [text.request for text in self._rows.owners if text is not None]
            for request in lost:
                request.error = error
            self.notify([request.changed for request in lost])

    def _wait(self) -> bool:
        """Wait for work; False: there is none, and none will come."""
        with self._condition:
            while not (self._queue or self._reading or self._rows.live() or self.closing):
                self._condition.wait()
            return bool(self._queue or self._reading or self._rows.live())

    def _turn(self) -> None:
        """One step of every text, and a piece of a prompt."""
        touched = self._drop()
        rows = self._rows.live()
        texts = [text for text in self._rows.owners if text is not None]
        began = time.monotonic()
        if rows:
            logits_PV = self._rows.step([text.text[-1] if text else 0 for text in self._rows.owners])
            parts = [logits_PV[rows] if len(rows) < len(logits_PV) else logits_PV]
        else:
            parts = []
        joined: list[tuple[Text, States]] = []
        for request, states, logits_1V in self._read(self.slots - len(rows)):
            touched.append(request)
            if request.most:
                joined += [(text, states) for text in request.texts]
                parts.append(logits_1V.expand(request.count, -1))
                self.metrics.first.observe(time.monotonic() - request.arrived)
        texts += [text for text, _ in joined]
        if texts:
            self._draw(texts, torch.cat(parts))
            self.metrics.step.observe(time.monotonic() - began)
        for row in rows:
            owner = self._rows.owners[row]
            if owner is not None and (owner.finish or owner.request.error):
                self._rows.free(row)
        self._rows.join([(text, states) for text, states in joined if not (text.finish or text.request.error)])
        self._count()
        self.notify(
            [request.changed for request in {id(r): r for r in (*touched, *(t.request for t in texts))}.values()]
        )

    def _drop(self) -> list[Request]:
        """Give up requests whose client has gone or whose time is over; returns the latter."""
        now, late = time.monotonic(), []

        def over(request: Request) -> bool:
            if request.cancelled:
                self.metrics.gone.inc(request.count)
            elif now - request.arrived > request.seconds:
                request.error = LateError(f"the text was not complete after {request.seconds:g} seconds")
                late.append(request)
            return request.cancelled or request.error is not None

        with self._condition:
            self._queue = deque(request for request in self._queue if not over(request))
        if self._reading and over(self._reading.request):
            self._reading = None
        gone = {id(t.request): over(t.request) for t in {id(t.request): t for t in self._rows.owners if t}.values()}
        for row in self._rows.live():
            if gone[id(self._rows.owners[row].request)]:  # type: ignore[union-attr]
                self._rows.free(row)
        return late

    def _read(self, free: int) -> list[tuple[Request, States, Tensor]]:
        """Read up to a piece of the prompts that are next; those that have been read, with their states and logits.

        Args:
            free: slots.
        """
        done, budget = [], self.piece
        while budget > 0:
            if self._reading is None:
                with self._condition:
                    if not self._queue or (self._queue[0].most and self._queue[0].count > free):
                        break
                    request = self._queue.popleft()
                self._reading = self._begin(request)
            request, position, cache, logits_1V = self._reading
            if position < len(request.prompt):
                piece = request.prompt[position : position + self.piece]
                if request.scored:
                    self._score_prompt(request, piece, cache)
                _, logits_1V = prefill(self.model, piece, cache=cache)
                position, budget = position + len(piece), budget - len(piece)
                self.metrics.read.inc(len(piece))
                self.prefixes.keep(request.prompt[:position], cache.states, logits_1V)
                self._reading = _Reading(request, position, cache, logits_1V)
            if position == len(request.prompt):
                assert logits_1V is not None
                done.append((request, [state or {} for state in cache.states], logits_1V))
                free -= request.count if request.most else 0
                self._reading = None
                if not request.most:
                    for text in request.texts:
                        text.finish = "length"
        return done

    def _begin(self, request: Request) -> _Reading:
        """Where reading begins: behind the longest prefix that is kept."""
        request.generator = torch.Generator(self.model.device)
        if request.seed is None:
            request.generator.seed()
        else:
            request.generator.manual_seed(request.seed)
        if request.how.repetition_penalty != 1.0:
            seen_V = torch.zeros(256, dtype=torch.bool, device=self.model.device)
            seen_V[sorted(set(request.prompt))] = True
            for text in request.texts:
                text.seen = seen_V.clone()
        found = None if request.scored else self.prefixes.find(request.prompt)
        if found is None:
            return _Reading(request, 0, LadderCache(num_blocks=len(self.model.model.layers)), None)
        request.reused, states, logits_1V = found
        self.metrics.hits.inc()
        self.metrics.reused.inc(request.reused)
        return _Reading(request, request.reused, LadderCache.from_states(states, request.reused), logits_1V)

    def _score_prompt(self, request: Request, piece: bytes, cache: LadderCache) -> None:
        """Append the scores of the bytes of a piece, apart from the reading itself, whose bits stay those of any prompt."""
        before = request.prompt_scores
        again = LadderCache.from_states(cache.states, int(cache.get_seq_length()))
        tokens_1T = torch.tensor([list(piece)], device=self.model.device)
        logprobs_TV = (
            self.model(input_ids=tokens_1T, past_key_values=again, use_cache=True).logits[0].float().log_softmax(-1)
        )
        if not before:
            before.append(Score(piece[0], None, []))
        start = len(before)
        following = request.prompt[start : start + len(piece)]
        before += [
            _score(byte, logprobs_V, request.tops or 0)
            for byte, logprobs_V in zip(following, logprobs_TV, strict=False)
        ]

    def _draw(self, texts: list[Text], logits_RV: Tensor) -> None:
        """Draw the next byte of every text. The texts of a request lie beside each other."""
        logits_RV = logits_RV.float()
        tokens_R = torch.zeros(len(texts), dtype=torch.long, device=logits_RV.device)
        noise: dict[int, Tensor] = {}
        alike: dict[Sampling, list[int]] = {}
        for row, text in enumerate(texts):
            alike.setdefault(text.request.how, []).append(row)
        for how, rows in alike.items():
            waits: list[Tensor] = []
            if how.temperature:
                for row in rows:  # the generator of a request serves all its texts, also those that have ended
                    request = texts[row].request
                    if id(request) not in noise:
                        noise_nV = torch.empty(request.count, 256, device=logits_RV.device)
                        noise[id(request)] = noise_nV.exponential_(1, generator=request.generator)
                    waits.append(noise[id(request)][texts[row].index])
            seen = [texts[row].seen for row in rows]
            seen_RV = torch.stack(seen) if how.repetition_penalty != 1.0 else None  # type: ignore[arg-type]
            scores_RV = kept_scores(logits_RV[rows], seen_RV, **how.settings)
            tokens_R[rows] = race(scores_RV, torch.stack(waits) if waits else None).argmax(-1)
        finite = logits_RV.isfinite().all(-1).tolist()
        for row, (text, byte) in enumerate(zip(texts, tokens_R.tolist(), strict=True)):
            request = text.request
            if not finite[row]:
                request.error = DivergedError("the model's logits are not finite: its weights have diverged")
                continue
            if request.tops is not None and byte not in self.ends:
                text.scores.append(_score(byte, logits_RV[row].log_softmax(-1), request.tops))
            if text.seen is not None:
                text.seen[byte] = True
            text.take(byte, self.ends)
        self.metrics.written.inc(len(texts))

    def _count(self) -> None:
        metrics = self.metrics
        metrics.slots.set(len(self._rows.live()))
        metrics.waiting.set(len(self._queue))
        metrics.prefixes.set(len(self.prefixes))
        metrics.prefix_bytes.set(self.prefixes.bytes)


def _score(byte: int, logprobs_V: Tensor, tops: int) -> Score:
    values, bytes_ = logprobs_V.topk(tops)
    return Score(byte, float(logprobs_V[byte]), list(zip(bytes_.tolist(), values.tolist(), strict=True)))
