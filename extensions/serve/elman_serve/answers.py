"""Texts in OpenAI's forms: whole answers and the events of a stream. A token is a byte."""

from __future__ import annotations

import codecs
import time
import uuid
from typing import Any

from .engine import Request, Score, Text


def _name(byte: int) -> str:
    """A byte as the token of a report, as OpenAI writes bytes that are no character alone."""
    return chr(byte) if byte < 128 else f"bytes:\\x{byte:02x}"


class Part:
    """One text on its way to a client, decoded as UTF-8 character by character.

    Attributes:
        index: of the choice. ids: bytes since the last call of `more`; scores: of them; offset: bytes before them.
    """

    def __init__(self, text: Text, index: int, echo: bool) -> None:
        self.text, self.index = text, index
        self.finish: str | None = None
        self.started = self.ended = False
        self.offset = 0
        self.ids: list[int] = []
        self.scores: list[Score] = []
        self._sent, self._echo = 0, echo
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def more(self) -> str:
        """The characters that have come since the last call; an unfinished one at the end of all is U+FFFD."""
        self.offset += len(self.ids)
        finish = self.text.finish  # before `shown`, which is set before it
        shown = self.text.shown
        raw = bytes(self.text.text[self._sent : shown])
        self.scores = self.text.scores[self._sent : shown]
        self._sent = shown
        if self._echo and (raw or finish):  # once, before the first byte
            self._echo = False
            raw = self.text.request.prompt + raw
            self.scores = self.text.request.prompt_scores + self.scores
        self.ids, self.finish = list(raw), finish
        return self._decoder.decode(raw, final=finish is not None)


class _Answer:
    """What both forms share.

    Args:
        model: its name. body: of the request.
    """

    kind = chunk = prefix = ""
    echo = False

    def __init__(self, model: str, body: dict[str, Any]) -> None:
        self.head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self.numbers = bool(body.get("return_token_ids"))
        self.scored = body.get("logprobs") is not None and body["logprobs"] is not False  # 0 asks too
        self.include_usage = bool(body.get("stream_options", {}).get("include_usage"))

    def choice(self, part: Part, text: str, delta: bool) -> dict[str, Any]:
        raise NotImplementedError

    def _choice(self, part: Part, text: str, delta: bool) -> dict[str, Any]:
        numbers = {"token_ids": part.ids} if self.numbers else {}
        return {"index": part.index, **self.choice(part, text, delta), "finish_reason": part.finish, **numbers}

    def event(self, part: Part) -> dict[str, Any] | None:
        """What a text has gained since the last event; None: nothing."""
        text = part.more()
        if part.ended or not (part.ids or part.finish):
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
        scores = part.scores
        tops = [{_name(byte): value for byte, value in score.top} if score.top else None for score in scores]
        return {
            "tokens": [_name(score.byte) for score in scores],
            "token_logprobs": [score.logprob for score in scores],
            "top_logprobs": tops,
            "text_offset": list(range(part.offset, part.offset + len(scores))),
        }


class Chat(_Answer):
    """Of /v1/chat/completions."""

    kind, chunk, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def choice(self, part: Part, text: str, delta: bool) -> dict[str, Any]:
        role = {} if part.started else {"role": "assistant"}
        scores = {"content": [self._logprob(score) for score in part.scores]} if self.scored else None
        return {"delta" if delta else "message": {**role, "content": text}, "logprobs": scores}

    @staticmethod
    def _logprob(score: Score) -> dict[str, Any]:
        def one(byte: int, value: float | None) -> dict[str, Any]:
            return {"token": _name(byte), "logprob": value, "bytes": [byte]}

        return {**one(score.byte, score.logprob), "top_logprobs": [one(*each) for each in score.top]}


def usage(jobs: list[Request]) -> dict[str, Any]:
    """Bytes read and written; those of a prompt whose state was kept are named apart."""
    read = sum(len(job.prompt) for job in jobs)
    written = sum(text.drawn for job in jobs for text in job.texts)
    cached = {"cached_tokens": sum(job.reused for job in jobs)}
    return {
        "prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written, "prompt_tokens_details": cached
    }  # fmt: skip
