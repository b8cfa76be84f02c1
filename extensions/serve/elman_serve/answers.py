"""Texts in OpenAI's forms: whole answers and the events of a stream."""

from __future__ import annotations

import codecs
import random
import time
from bisect import bisect_left
from itertools import accumulate
from typing import Any

from .request import Request, Score, Text


def _name(text: bytes) -> str:
    """A token as a report names it, as OpenAI writes bytes that are no characters alone."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)


class Part:
    """One text on its way to a client, decoded as UTF-8 character by character.

    Args:
        texts: of each token. echo: whether the prompt comes first.

    Attributes:
        index: of the choice. tokens: that begin in what the last call of `more` returned; starts, scores: of them.
    """

    def __init__(self, text: Text, index: int, echo: bool, texts: list[bytes]) -> None:
        self.text, self.index, self.texts = text, index, texts
        self.finish: str | None = None
        self.started = self.ended = False
        self.tokens: list[int] = []
        self.starts: list[int] = []
        self.scores: list[Score] = []
        self._bytes = self._count = self._before = 0
        self._echo = echo
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def more(self) -> str:
        """The characters that have come since the last call; an unfinished one at the end of all is U+FFFD."""
        text, finish = self.text, self.text.finish  # before `shown`, which is set before it
        shown = text.shown
        complete = finish and shown == len(text.text)  # a last token may have no text
        count = len(text.tokens) if complete else bisect_left(text.starts, shown)
        raw, new = bytes(text.text[self._bytes : shown]), slice(self._count, count)
        self._bytes, self._count, self.finish = shown, count, finish
        self.tokens, self.starts, self.scores = [], [], []
        if self._echo and (raw or finish):  # once, before the first byte
            self._echo, self.tokens, self.scores = False, [*text.request.prompt], text.request.prompt_scores
            pieces = [self.texts[token] for token in self.tokens]
            *self.starts, self._before = accumulate(map(len, pieces), initial=0)
            raw = b"".join([*pieces, raw])
        self.tokens, self.scores = self.tokens + text.tokens[new], self.scores + text.scores[new]
        self.starts += [self._before + start for start in text.starts[new]]
        return self._decoder.decode(raw, final=finish is not None)


class _Answer:
    """What both forms share.

    Args:
        model: its name. body: of the request.
    """

    kind = chunk = prefix = ""
    echo = False

    def __init__(self, model: str, body: dict[str, Any]) -> None:
        self.head = {"id": f"{self.prefix}-{random.getrandbits(128):032x}", "created": int(time.time()), "model": model}
        self.numbers = bool(body.get("return_token_ids"))
        self.scored = body.get("logprobs") is not None and body["logprobs"] is not False  # 0 asks too
        self.include_usage = bool(body.get("stream_options", {}).get("include_usage"))

    def choice(self, part: Part, text: str, delta: bool) -> dict[str, Any]:
        raise NotImplementedError

    def _choice(self, part: Part, text: str, delta: bool) -> dict[str, Any]:
        numbers = {"token_ids": part.tokens} if self.numbers else {}
        return {"index": part.index, **self.choice(part, text, delta), "finish_reason": part.finish, **numbers}

    def event(self, part: Part) -> dict[str, Any] | None:
        """What a text has gained since the last event; None: nothing."""
        text = part.more()
        if part.ended or not (text or part.tokens or part.finish):
            return None
        part.ended = part.finish is not None
        made = {**self.head, "object": self.chunk, "choices": [self._choice(part, text, True)]}
        part.started = True
        return {**made, "usage": None} if self.include_usage else made

    def usage_event(self, jobs: list[Request]) -> dict[str, Any]:
        return {**self.head, "object": self.chunk, "choices": [], "usage": usage(jobs)}

    def whole(self, parts: list[Part], jobs: list[Request]) -> dict[str, Any]:
        """The answer to a request without a stream."""
        choices = [self._choice(part, part.more(), False) for part in parts]
        return {**self.head, "object": self.kind, "choices": choices, "usage": usage(jobs)}


class Completion(_Answer):
    """Of /v1/completions."""

    kind = chunk = "text_completion"
    prefix = "cmpl"

    def __init__(self, model: str, body: dict[str, Any]) -> None:
        super().__init__(model, body)
        self.echo = bool(body.get("echo"))

    def choice(self, part: Part, text: str, delta: bool) -> dict[str, Any]:
        return {"text": text, "logprobs": self._logprobs(part) if self.scored else None}

    @staticmethod
    def _logprobs(part: Part) -> dict[str, Any]:
        names = [_name(part.texts[score.token]) for score in part.scores]
        tops = [  # as OpenAI's, with what was drawn
            {_name(part.texts[token]): value for token, value in (*score.top, (score.token, score.logprob))}
            if score.top
            else None
            for score in part.scores
        ]
        logprobs = [score.logprob for score in part.scores]
        return {"tokens": names, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": part.starts}


class Chat(_Answer):
    """Of /v1/chat/completions."""

    kind, chunk, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def choice(self, part: Part, text: str, delta: bool) -> dict[str, Any]:
        role = {} if part.started else {"role": "assistant"}
        scores = {"content": [self._logprob(score, part.texts) for score in part.scores]} if self.scored else None
        return {"delta" if delta else "message": {**role, "content": text}, "logprobs": scores}

    @staticmethod
    def _logprob(score: Score, texts: list[bytes]) -> dict[str, Any]:
        def one(token: int, value: float | None) -> dict[str, Any]:
            return {"token": _name(texts[token]), "logprob": value, "bytes": [*texts[token]]}

        return {**one(score.token, score.logprob), "top_logprobs": [one(*each) for each in score.top]}


def usage(jobs: list[Request]) -> dict[str, Any]:
    """Tokens read and written; those of a prompt whose state was kept are named apart."""
    read = sum(len(job.prompt) for job in jobs)
    written = sum(len(text.tokens) for job in jobs for text in job.texts)
    cached = {"cached_tokens": sum(job.reused for job in jobs)}
    return {
        "prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written, "prompt_tokens_details": cached
    }  # fmt: skip
