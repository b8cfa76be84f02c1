"""The decoding loop: a thread that writes the texts of all requests, in turns.

Requests join and leave between turns. A turn is a step of all texts and a piece of the prompts that are being read, several at
once; where none is, and all texts have the same plain settings, it is as many steps as take `TURN_SECONDS`, without the host
between them. Every text is the one that `elman generate` writes for its prompt, settings and seed: it gets the same sums (see
`least_rows`) and the same random numbers.

Shapes: R rows of a draw, n texts of a request, V vocabulary.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from elman_core.extension import (
    ConfigError,
    DivergedError,
    HostCopy,
    Sampling,
    hash_u64,
    kept_scores,
    noise,
    prefill_chunk,
    race,
    scaled_once,
)

from .language import Language
from .metrics import Metrics
from .request import BusyError, LateError, Request, Score, Text
from .states import Prefixes, Rows, States, kind, read

PIECES = 4
"""Of prompts, so many pieces' tokens are read at a time, while streams wait. More cost as much each, for memory that is new."""

TURN_SECONDS = 0.01
"""Of steps without the host between them: a new prompt waits for them, and so do streams. On a GPU, half of them are computed
while the host takes the others."""

GATHER_SECONDS = 0.0005
"""Where nothing runs, prompts that come so soon after one another are read together. While the event loop is busy with others,
which holds the interpreter, it is longer."""


@dataclass(eq=False)
class _Reading:
    """A prompt of which `position` tokens have been read. states: after them, empty at the start."""

    request: Request
    position: int = 0
    states: States = field(default_factory=list)
    logits: Tensor | None = None

    @property
    def done(self) -> bool:
        return self.position == len(self.request.prompt)


class Engine(threading.Thread):
    """Writes the texts of requests.

    Args:
        model: in evaluation mode; its states have a constant size.
        ends: tokens that end a text. language: of the model. slots: texts that are written at once.
        queue: requests that wait at most. prefix_bytes: states of prefixes kept at most, in bytes.
        together: whether prompts are read together, because that leaves their bits as they are (`independent`).
        notify: called in this thread with the `changed` of requests that have something new, after each step.

    Attributes:
        step_seconds: of the last step of the model.

    Raises:
        ConfigError: a model that cannot be served.
    """

    def __init__(
        self,
        model: Any,
        ends: set[int],
        language: Language,
        *,
        slots: int,
        queue: int,
        prefix_bytes: int,
        notify: Callable[[list[Any]], None],
        together: bool = True,
    ) -> None:
        super().__init__(name="decode", daemon=True)
        if any(block.mixer.state_growth != "constant" for block in model.model.layers):
            raise ConfigError("the state of this model grows with the text: only states of constant size can be served")
        self.model, self.ends, self.language, self.together = model, ends, language, together
        self.slots, self.most_waiting, self.notify = slots, queue, notify
        self.metrics, self.closing, self.step_seconds = Metrics(), False, 0.0
        self._paced = False  # whether `step_seconds` tells how long the next steps take
        self.failure: Exception | None = None
        self.piece = prefill_chunk(model.device)
        self.prefixes = Prefixes(prefix_bytes, self.piece)
        self._rows: Rows[Text] = Rows(model, slots)
        self._reading: list[_Reading] = []
        self._under_way: list[HostCopy] = []  # draws of all rows, which nothing may change before they are read
        self._queue: deque[Request] = deque()
        self._condition = threading.Condition()

    def submit(self, *requests: Request) -> None:
        """Queue requests, all or none.

        Raises:
            BusyError: the queue is full, or the engine is closing.
        """
        with self._condition:
            if self.closing:
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
        except Exception as error:
            # Whatever a model raises: all requests are told, and whoever started the thread looks.
            with self._condition:
                self.failure, self.closing, lost = error, True, self._requests()
            for request in lost:
                request.error = error
            self.notify([request.changed for request in lost])

    def _requests(self) -> set[Request]:
        """All requests: those that wait, are read, or run."""
        own = {reading.request for reading in self._reading} | {text.request for text in self._rows.owners if text}
        return own.union(self._queue)

    def _wait(self) -> bool:
        """Wait for work; False: there is none, and none will come."""
        with self._condition:
            running = bool(self._reading or self._rows.live())
            while not (self._queue or running or self.closing):
                self._condition.wait()
        waiting = 0
        while not running and waiting < len(self._queue) < self.slots:
            waiting = len(self._queue)
            time.sleep(GATHER_SECONDS)
        return bool(self._queue or running)

    def _turn(self) -> None:
        """One step of every text, and pieces of prompts; or several steps."""
        touched = self._drop()
        rows = self._rows.live()
        if not rows:
            self._under_way = []
        if not self._under_way:
            self._admit(self.slots - len(rows))
        texts = [text for text in self._rows.owners if text is not None]
        joined: list[tuple[Text, States]] = []
        how = None if self._reading else _plain(texts)
        if how is not None:
            self._write_on(texts, how)
        else:
            joined = self._step_and_read(rows, texts, touched)
        self._paced = how is not None
        for row in rows:
            owner = self._rows.owners[row]
            if owner is not None and (owner.finish or owner.request.error):
                self._rows.free(row)
        self._rows.join([(text, states) for text, states in joined if not (text.finish or text.request.error)])
        self._count()
        self.notify([request.changed for request in touched.union(text.request for text in texts)])

    def _write_on(self, texts: list[Text], how: Sampling) -> None:
        """Several tokens of every text; what comes behind the end of a text is dropped."""
        began, owners, ahead = time.monotonic(), self._rows.owners, self._rows.ahead
        left = max(text.request.most - len(text.tokens) for text in texts)
        paced = int(TURN_SECONDS / (2 if ahead else 1) / self.step_seconds) if self._paced else 1
        if not self._under_way:
            told = [(text.tokens[-1], text.key, len(text.tokens)) if text else (0, 0, 0) for text in owners]
            self._under_way = self._rows.draw(told, how, max(1, min(left, paced)))
        copies, self._under_way = self._under_way, []
        left -= sum(len(copy.values) for copy in copies)
        if ahead and left > 0 and not self._due(owners.count(None)):
            self._under_way = self._rows.draw(None, how, max(1, min(left, paced)))
        drawn = [row for copy in copies for row in copy.read()]
        for text, tokens in zip(owners, zip(*drawn, strict=True), strict=True):
            if text is not None:
                self._take(text, tokens)
        self.step_seconds = (time.monotonic() - began) / len(drawn)
        for _ in drawn:
            self.metrics.step.observe(self.step_seconds)

    def _step_and_read(self, rows: list[int], texts: list[Text], touched: set[Request]) -> list[tuple[Text, States]]:
        """One token of every text and pieces of prompts; returns the texts of those that have been read whole, which are added.

        Args:
            rows: of the texts. touched: requests with something new are added.
        """
        began = time.monotonic()
        if rows:
            logits_PV = self._rows.step(torch.tensor([text.tokens[-1] if text else 0 for text in self._rows.owners]))
            parts = [logits_PV[rows] if len(rows) < len(logits_PV) else logits_PV]
            self.step_seconds = time.monotonic() - began
        else:
            parts = []
        joined: list[tuple[Text, States]] = []
        for request, states, logits_1V in self._read():
            touched.add(request)
            if request.most:
                joined += [(text, states) for text in request.texts]
                parts += [logits_1V] * request.count
                self.metrics.first.observe(time.monotonic() - request.arrived)
        texts += [text for text, _ in joined]
        if texts:
            self._draw(texts, torch.cat(parts))
            self.metrics.step.observe(time.monotonic() - began)
        return joined

    def _drop(self) -> set[Request]:
        """Give up requests whose client has gone or whose time is over; returns the latter."""
        now = time.monotonic()
        with self._condition:
            requests = self._requests()
            gone = {request for request in requests if request.cancelled}
            late = {request for request in requests - gone if now - request.arrived > request.seconds}
            for request in late:
                request.error = LateError(f"the text was not complete after {request.seconds:g} seconds")
            self._queue = deque(request for request in self._queue if request not in gone | late)
        self.metrics.gone.inc(sum(request.count for request in gone))
        self._reading = [reading for reading in self._reading if reading.request not in gone | late]
        for row, text in enumerate(self._rows.owners):
            if text is not None and text.request in gone | late:
                self._rows.free(row)
        return late

    def _read(self) -> list[tuple[Request, States, Tensor]]:
        """Read pieces of the prompts that are next; those that have been read whole, with their states and logits."""
        due = [reading for reading in self._reading if not reading.done]
        group = [reading for reading in due if self._kind(reading) == self._kind(due[0])]
        if group:
            budget = self.piece * PIECES // max(self._end(r) - r.position for r in group)
            group = group[: max(1, budget) if self.together else 1]
            self._read_on(group)
            self._reading = [reading for reading in self._reading if reading not in group] + group  # all get their turn
        done = [reading for reading in self._reading if reading.done]
        self._reading = [reading for reading in self._reading if not reading.done]
        for reading in done:
            if not reading.request.most:
                for text in reading.request.texts:
                    text.end("length")
        return [(reading.request, reading.states, reading.logits) for reading in done]  # type: ignore[misc]

    def _kind(self, reading: _Reading) -> tuple[bool, int]:
        """What prompts that are read together share: whether they begin, and the `kind` of their pieces."""
        return bool(reading.states), kind(self.model, self._end(reading) - reading.position)

    def _end(self, reading: _Reading) -> int:
        """Where the next piece ends, after which a state is kept; on a CPU, pieces are those of `elman generate`."""
        return min((reading.position // self.piece + 1) * self.piece, len(reading.request.prompt))

    def _read_on(self, group: list[_Reading]) -> None:
        """Read the next piece of each."""
        ends = [self._end(reading) for reading in group]
        pieces = [r.request.prompt[r.position : end] for r, end in zip(group, ends, strict=True)]
        scored = any(r.request.scored for r in group)
        after, logits = read(self.model, pieces, [r.states for r in group], every=scored)
        for reading, piece, end, states, logits_TV in zip(group, pieces, ends, after, logits, strict=True):
            request, start = reading.request, reading.position
            last_1V = logits_TV[-1:].clone() if scored else logits_TV
            reading.position, reading.states, reading.logits = end, states, last_1V
            if request.scored:
                scores, known = request.prompt_scores, request.prompt[start + 1 : end + 1]
                scores += [] if scores else [Score(piece[0], None, [])]
                for token, logprobs_V in zip(known, logits_TV.float().log_softmax(-1), strict=False):
                    scores.append(_score(token, logprobs_V, request.tops or 0))
            self.prefixes.keep(request.keys[start // self.piece], states, last_1V)
        self.metrics.read.inc(sum(map(len, pieces)))

    def _admit(self, free: int) -> None:
        """Begin to read the prompts that wait, behind the longest prefix that is kept, while there are slots. One that goes on
        like another that is being read waits for its states."""
        free -= sum(reading.request.count for reading in self._reading if reading.request.most)
        under_way = {self._goal(reading) for reading in self._reading}
        with self._condition:
            waiting = list(islice(self._queue, self.slots - len(self._reading)))
        for request in waiting:
            if request.most and request.count > free:
                break
            request.keys = request.keys or self.prefixes.keys(request.prompt)  # once: it may wait for many turns
            reading = _Reading(request)
            if not request.scored and (found := self.prefixes.find(request.keys)):
                pieces, reading.states, reading.logits = found
                reading.position = min(pieces * self.piece, len(request.prompt))
            if not reading.done and self.prefixes.most:
                if (goal := self._goal(reading)) in under_way:
                    continue
                under_way.add(goal)
            with self._condition:
                self._queue.remove(request)
            self._reading.append(reading)
            self._prepare(reading)
            free -= request.count if request.most else 0

    def _due(self, free: int) -> bool:
        """Whether the next prompt that waits can be begun."""
        return bool(self._queue) and (not self._queue[0].most or self._queue[0].count <= free)

    def _goal(self, reading: _Reading) -> bytes:
        """The key of the prompt up to where the next piece ends."""
        return reading.request.keys[reading.position // self.piece]

    def _prepare(self, reading: _Reading) -> None:
        """Random numbers, tokens that a penalty counts, and what is said of the prefix."""
        request = reading.request
        seed = random.getrandbits(64) if request.seed is None else request.seed
        keys = hash_u64(seed, range(request.count)).view("int64")  # `keys_of` without torch, which takes longer
        for text, key in zip(request.texts, keys.tolist(), strict=True):
            text.key = key
        if request.how.repetition_penalty != 1.0:
            seen_V = torch.zeros(len(self.language.texts), dtype=torch.bool, device=self.model.device)
            seen_V[sorted(set(request.prompt))] = True
            for text in request.texts:
                text.seen = seen_V.clone()
        if reading.position:
            request.reused = reading.position
            self.metrics.hits.inc()
            self.metrics.reused.inc(reading.position)

    def _draw(self, texts: list[Text], logits_RV: Tensor) -> None:
        """Draw the next token of every text."""
        logits_RV = logits_RV.float()
        tokens_R = torch.zeros(len(texts), dtype=torch.long, device=logits_RV.device)
        alike: dict[Sampling, list[int]] = {}
        for row, text in enumerate(texts):
            alike.setdefault(text.request.how, []).append(row)
        for how, rows in alike.items():
            waits_RV = None
            if how.temperature:
                told_R2 = torch.tensor([(texts[row].key, len(texts[row].tokens)) for row in rows])
                keys_R, counts_R = told_R2.to(logits_RV.device).T
                waits_RV = noise(keys_R, counts_R, logits_RV.shape[-1])
            seen = [texts[row].seen for row in rows]
            seen_RV = torch.stack(seen) if how.repetition_penalty != 1.0 else None  # type: ignore[arg-type]
            scores_RV = kept_scores(logits_RV[rows], seen_RV, **how.settings)
            tokens_R[rows] = race(scores_RV, waits_RV).argmax(-1)
        shown_R = torch.where(logits_RV.isfinite().all(-1), tokens_R, -1)
        for row, (text, token) in enumerate(zip(texts, shown_R.tolist(), strict=True)):
            if text.request.tops is not None and token >= 0 and token not in self.ends:
                text.scores.append(_score(token, logits_RV[row].log_softmax(-1), text.request.tops))
            if text.seen is not None and token >= 0:
                text.seen[token] = True
            self._take(text, [token])

    def _take(self, text: Text, tokens: Sequence[int]) -> None:
        """Append tokens that were drawn, up to the end of the text; -1 stands for logits that are not finite."""
        before = len(text.tokens)
        for token in tokens:
            if token < 0:
                text.request.error = DivergedError("the model's logits are not finite: its weights have diverged")
            elif token in self.ends:
                text.end("stop")
            else:
                text.take(token, self.language.texts[token])
            if text.finish or token < 0:
                break
        self.metrics.written.inc(len(text.tokens) - before)

    def _count(self) -> None:
        metrics = self.metrics
        metrics.slots.set(len(self._rows.live()))
        metrics.waiting.set(len(self._queue))
        metrics.prefixes.set(len(self.prefixes))
        metrics.prefix_bytes.set(self.prefixes.bytes)


def _plain(texts: list[Text]) -> Sampling | None:
    """The settings of all texts, if they are the same and nothing else is asked; else None."""
    hows = {text.request.how for text in texts}
    plain = len(hows) == 1 and all(text.request.tops is None and text.seen is None for text in texts)
    return hows.pop() if plain else None


def _score(token: int, logprobs_V: Tensor, tops: int) -> Score:
    values, tokens = logprobs_V.topk(tops)
    return Score(token, float(logprobs_V[token]), list(zip(tokens.tolist(), values.tolist(), strict=True)))
