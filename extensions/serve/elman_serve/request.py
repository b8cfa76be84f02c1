"""What clients ask the engine for: requests, and their texts."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from elman_core.extension import ElmanError, Sampling

from .states import Prompt


class Score(NamedTuple):
    """A token, the natural logarithm of its probability (None for a prompt's first), and the likeliest tokens with theirs."""

    token: int
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
        tokens: drawn so far, the end excepted. starts: where each begins in `text`, in bytes. scores: of each, if asked for.
        text: UTF-8. shown: how many bytes of it no stop string can take back.
        finish: "stop" or "length" when it is complete. key: of its noise.
    """

    request: Request
    tokens: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    text: bytearray = field(default_factory=bytearray)
    shown: int = 0
    finish: str | None = None
    seen: Tensor | None = None
    key: int = 0

    def take(self, token: int, text: bytes) -> None:
        """Append a token that was drawn."""
        before, stops = len(self.text), self.request.stops
        self.tokens.append(token)
        self.starts.append(before)
        self.text += text
        found = [at for stop in stops if (at := self.text.find(stop, max(0, before - len(stop) + 1))) >= 0]
        if found:
            self.shown, self.finish = min(found), "stop"
        elif len(self.tokens) == self.request.most:
            self.end("length")
        else:
            self.shown = len(self.text) - max((_begun(self.text, stop) for stop in stops), default=0)

    def end(self, finish: str) -> None:
        """Complete it as it is."""
        self.shown, self.finish = len(self.text), finish


def _begun(text: bytearray, stop: bytes) -> int:
    """How many bytes at the end of `text` may become `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


@dataclass(eq=False)
class Request:
    """A prompt to continue `count` times.

    Attributes:
        prompt: tokens, not empty. most: tokens of each text at most; 0 only reads the prompt. stops: UTF-8, not empty each.
        seed: as of `elman generate`; None for a new one. tops: likeliest tokens to report for each token; None reports nothing.
        scored: report the tokens of the prompt too. seconds: from now on, until it is given up.
        changed: its `set()` is called when there is something new. keys: of the prompt's pieces, as `Prefixes` makes them.
    """

    prompt: Prompt
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
    keys: list[bytes] = field(default_factory=list)
    prompt_scores: list[Score] = field(default_factory=list)
    error: Exception | None = None
    cancelled: bool = False

    def __post_init__(self) -> None:
        self.texts = [Text(self) for _ in range(self.count)]
        self.arrived = time.monotonic()

    @property
    def done(self) -> bool:
        return self.error is not None or all(text.finish is not None for text in self.texts)

    def cancel(self) -> None:
        """Nobody waits for it any more: its slots are free from the next step on."""
        self.cancelled = True
