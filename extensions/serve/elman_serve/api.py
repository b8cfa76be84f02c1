"""The HTTP side: OpenAI's routes over an `Engine`, errors in OpenAI's form, `/health` and `/metrics`."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import time
from array import array
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from elman_core import __version__
from elman_core.extension import Sampling, document_start

from . import schema
from .answers import Chat, Completion, Part
from .engine import Engine
from .request import BusyError, LateError, Request
from .states import Prompt

EVENT_SECONDS, STEP_EVENTS = 0.0025, 16
"""Between the events of all streams, and how many there are for each step: one costs as much as several rows of a step, so the
tokens of several steps share it."""

EVENT_HEADERS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store"))

BODY_SECONDS = 30
"""A client has so long to send a body."""

PARSED_APART = 4096
"""Bytes of a body from which on it is parsed beside the loop, which it would hold; less is done before a thread is."""


class ApiError(Exception):
    """An answer in OpenAI's form of an error."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        kind = "invalid_request_error" if status < 429 else "server_error"
        if status == 429:
            kind = "rate_limit_error"
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def response(self, headers: Mapping[str, str] | None = None) -> Response:
        headers = headers or {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}.get(self.status, {})
        if self.status in (408, 413):  # the rest of the body is not read
            headers = {"Connection": "close"}
        return JSONResponse(self.body, self.status, headers)


def refusal(error: Exception) -> ApiError:
    """What a client is told of an error of the engine."""
    if isinstance(error, LateError):
        return ApiError(504, str(error), "timeout")
    return ApiError(500, f"the model failed: {error}", "model_failed")


async def _told(request: HttpRequest, error: Exception) -> Response:
    """The answer to an error that ends a request. Starlette runs what is not async in a thread, which outlives ^C."""
    if isinstance(error, ApiError):
        return error.response()
    if isinstance(error, HTTPException):
        said = f"{error.detail}: {request.method} {request.url.path}; /openapi.json lists the routes"
        return ApiError(error.status_code, said).response(error.headers)
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)
    return ApiError(500, "the server failed; its log says more").response()


class Api:
    """The ASGI application of one engine.

    Args:
        engine: its `notify` must call `set()` in the event loop. name: of the model, for clients.
        seconds: of a request at most. key: asked of every client; None: of none.

    Attributes:
        streams: that are open.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        limits: schema.Limits,
        *,
        seconds: float = 600.0,
        key: str | None = None,
    ) -> None:
        self.engine, self.name, self.limits, self.language = engine, name, limits, engine.language
        self.seconds, self.key, self.created = seconds, key, int(time.time())
        self.streams = 0
        self._parser = ThreadPoolExecutor(1, "parse")
        bodies = {"/v1/completions": schema.completion(limits)}
        if self.language.template is not None:
            bodies["/v1/chat/completions"] = schema.chat(limits)
        for body in bodies.values():
            body["properties"]["model"]["enum"] = [name]
        self.document = schema.document(__version__, bodies, key is not None)
        # a wrong name is a 404, and `_prompts` checks a prompt of many numbers a thousand times as fast
        apart: dict[str, Any] = {"model": {"type": "string"}, "prompt": {}}
        self._validators: dict[str, tuple[Any, dict[str, Any]]] = {}  # of bodies, and of their fields
        for path, body in bodies.items():
            own = {field: apart.get(field, about) for field, about in body["properties"].items()}
            whole = jsonschema.Draft202012Validator({**body, "properties": own})
            self._validators[path] = whole, {field: whole.evolve(schema=about) for field, about in own.items()}
        routes = [
            *(Route(path, self.texts, methods=["POST"]) for path in ("/v1/completions", "/v1/chat/completions")),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.models),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/openapi.json", self.openapi),
        ]
        handlers: Any = dict.fromkeys((ApiError, HTTPException, ClientDisconnect, Exception), _told)
        self._app = Starlette(routes=routes, exception_handlers=handlers)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"] if scope["path"] in self.document["paths"] else "other"
                self.engine.metrics.requests.labels(path, message["status"]).inc()
            await send(message)

        if scope["type"] == "http" and self.key is not None and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, b"Bearer " + self.key.encode()):
                said = "a wrong key" if given else "no key: send it as Authorization: Bearer KEY"
                await ApiError(401, said, "invalid_api_key").response()(scope, receive, counted)
                return
        await self._app(scope, receive, counted)

    async def models(self, request: HttpRequest) -> Response:
        about = {"id": self.name, "object": "model", "created": self.created, "owned_by": "elman"}
        if "name" not in request.path_params:
            return JSONResponse({"object": "list", "data": [about]})
        self._check_name(request.path_params["name"])
        return JSONResponse(about)

    async def health(self, _: HttpRequest) -> Response:
        well = self.engine.is_alive() and not self.engine.closing
        return JSONResponse({"status": "ok" if well else "ending"}, 200 if well else 503)

    async def metrics(self, _: HttpRequest) -> Response:
        return Response(generate_latest(self.engine.metrics.registry), media_type="text/plain; version=0.0.4")

    async def openapi(self, _: HttpRequest) -> Response:
        return JSONResponse(self.document)

    async def texts(self, request: HttpRequest) -> Response | _Stream:
        """Both routes that write texts."""
        path = request.url.path
        if path not in self._validators:
            raise ApiError(
                404, "the tokenizer of this model has no chat template: use /v1/completions", "no_chat_template"
            )
        raw = await self._body(request)
        if len(raw) < PARSED_APART:
            body, prompts = self._parse(raw, path)
        else:
            body, prompts = await asyncio.get_running_loop().run_in_executor(self._parser, self._parse, raw, path)
        answer = Chat(self.name, body) if "messages" in body else Completion(self.name, body)
        news = _News()
        news.jobs = jobs = [self._job(prompt, body, news) for prompt in prompts]
        try:
            self.engine.submit(*jobs)
        except BusyError as error:
            raise ApiError(503 if self.engine.closing else 429, str(error), "busy") from error
        texts = enumerate(text for job in jobs for text in job.texts)
        parts = [Part(text, index, answer.echo, self.language.texts) for index, text in texts]
        if body.get("stream"):
            return _Stream(self, news, parts, answer)
        with news.given_up_without(request.receive):
            await news.over.wait()
        if any(job.cancelled for job in jobs):
            raise ClientDisconnect
        if (failed := news.failure()) is not None:
            raise refusal(failed)
        return JSONResponse(answer.whole(parts, jobs))

    def _check_name(self, name: str) -> None:
        if name != self.name:
            raise ApiError(404, f"there is no model {name!r} here, only {self.name!r}", "model_not_found", "model")

    async def _body(self, request: HttpRequest) -> bytes:
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "the body must be JSON: send Content-Type: application/json")
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > self.limits.body:
                        raise ApiError(413, f"the body is larger than {self.limits.body:,} bytes")
        except TimeoutError as error:
            raise ApiError(408, f"the body was not complete after {BODY_SECONDS} seconds") from error
        return bytes(body)

    def _parse(self, raw: bytes, path: str) -> tuple[dict[str, Any], list[Prompt]]:
        """A body that is as the schema says, without fields that are null, and its prompts."""
        try:
            body = json.loads(raw, parse_constant=_no_constant)
            json.dumps(body, ensure_ascii=False).encode()  # half a surrogate pair is no text
            error = self._wrong(body, path)
        except (ValueError, RecursionError) as broken:
            raise ApiError(400, f"the body is not JSON: {broken}"[:200]) from broken
        if error is not None:
            param = ".".join(map(str, error.absolute_path)) or None
            raise ApiError(400, f"{param or 'the body'}: {error.message}"[:500], "invalid_value", param)
        body = {name: value for name, value in body.items() if value is not None}
        self._check_name(body["model"])
        for field, needed in (("stream_options", "stream"), ("top_logprobs", "logprobs")):
            if field in body and not body.get(needed):
                raise ApiError(400, f"{field}: only with {needed} = true", "invalid_value", field)
        count = body.get("n", 1)
        if body.get("best_of", count) != count:
            raise ApiError(400, f"best_of: only the same as n, which is {count}", "invalid_value", "best_of")
        return body, self._prompts(body)

    def _wrong(self, body: Any, path: str) -> Any:
        """The error that best tells what is wrong with a body. That nothing is, its fields show in a third of the time."""
        whole, fields = self._validators[path]
        known = isinstance(body, dict) and {*whole.schema["required"]} <= body.keys() <= fields.keys()
        if known and all(fields[name].is_valid(value) for name, value in body.items()):
            return None
        return jsonschema.exceptions.best_match(whole.iter_errors(body))

    def _prompts(self, body: dict[str, Any]) -> list[Prompt]:
        param = "messages" if "messages" in body else "prompt"
        if param == "messages":
            assert self.language.template is not None
            try:
                given: list[Any] = [self.language.template(body["messages"])]
            except Exception as error:  # whatever a template raises, such as for roles that do not alternate
                raise ApiError(400, f"the chat template refuses these messages: {error}", param=param) from error
        else:
            whole = body.get("prompt")
            given = whole if isinstance(whole, list) and whole and isinstance(whole[0], str | list) else [whole]
        try:
            if len({type(text) for text in given}) > 1:
                raise TypeError
            prompts = [self.language.encode(text) if isinstance(text, str) else self._tokens(text) for text in given]
        except (TypeError, ValueError, OverflowError) as error:
            most = self.limits.vocab - 1
            said = f"the prompt must be Unicode text, or tokens as numbers from 0 to {most}, or a list of either"
            raise ApiError(400, said, "invalid_value", param) from error
        most_prompts = min(self.limits.texts, self.engine.most_waiting)
        if len(prompts) > most_prompts:
            said = f"a request has at most {most_prompts} prompts, not {len(prompts):,}"
            raise ApiError(400, said, "invalid_value", param)
        longest = max(map(len, prompts))
        if longest > self.limits.prompt:
            raise ApiError(
                400,
                f"the prompt has {longest:,} tokens, more than {self.limits.prompt:,}",
                "context_length_exceeded",
                param,
            )
        return prompts

    def _tokens(self, numbers: Any) -> Prompt:
        """Tokens given as numbers, of which 97.0 is one too in JSON; `true` is none."""
        if not isinstance(numbers, list) or not numbers or not {type(number) for number in numbers} <= {int, float}:
            raise TypeError
        whole = [int(number) for number in numbers]
        if whole != numbers or not 0 <= min(whole) <= max(whole) < self.limits.vocab:
            raise ValueError
        return bytes(whole) if self.limits.vocab == 256 else array("I", whole)

    def _job(self, prompt: Prompt, body: dict[str, Any], news: _News) -> Request:
        stop, chat = body.get("stop", ()), "messages" in body
        most = body.get("max_tokens", self.limits.tokens if chat else min(16, self.limits.tokens))
        tops = body.get("logprobs")
        if chat:
            tops = body.get("top_logprobs", 0) if tops else None
        how = Sampling(
            float(body.get("temperature", 1.0)), int(body.get("top_k", 0)), float(body.get("top_p", 1.0)),
            float(body.get("repetition_penalty", 1.0)),
        )  # fmt: skip
        return Request(
            prompt=prompt or self._tokens([document_start(self.engine.model)]),
            how=how,
            most=int(body.get("max_completion_tokens", most)),
            changed=news,
            count=int(body.get("n", 1)),
            stops=tuple(text.encode() for text in ([stop] if isinstance(stop, str) else stop)),
            seed=None if "seed" not in body else int(body["seed"]),
            tops=None if tops is None else int(tops),
            scored=tops is not None and bool(body.get("echo")),
            seconds=self.seconds,
        )


class _News(asyncio.Event):
    """Set when requests have something new.

    Attributes:
        jobs: the requests. over: set when all are done or their client has gone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.jobs: list[Request] = []
        self.over = asyncio.Event()

    def set(self) -> None:
        super().set()
        if all(job.done for job in self.jobs):
            self.over.set()

    def failure(self) -> Exception | None:
        return next((job.error for job in self.jobs if job.error is not None), None)

    @contextlib.contextmanager
    def given_up_without(self, receive: Any) -> Iterator[None]:
        """The requests are given up when the client closes its connection, and at the end of the context."""
        gone = asyncio.ensure_future(_gone(receive))
        gone.add_done_callback(self._give_up)
        try:
            yield
        finally:
            gone.cancel()

    def _give_up(self, _: asyncio.Future[None]) -> None:
        for job in self.jobs:
            if not job.done:
                job.cancel()
        super().set()
        self.over.set()


class _Stream:
    """A response of events, which begins with the first: what comes before is on the way of all others to theirs.

    An event holds all that a text has gained since the last: a client that reads slowly gets fewer and longer ones.
    """

    def __init__(self, api: Api, news: _News, parts: list[Part], answer: Any) -> None:
        self.api, self.news, self.parts, self.answer = api, news, parts, answer

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.api.streams += 1
        try:
            with self.news.given_up_without(receive):
                await self._events(send)
        finally:
            self.api.streams -= 1

    async def _events(self, send: Any) -> None:
        news, jobs, begun, ended = self.news, self.news.jobs, False, False
        while not ended:
            await news.wait()  # for the first token without a pause
            news.clear()
            if any(job.cancelled for job in jobs):
                return
            failed = news.failure()
            ended = failed is not None or all(job.done for job in jobs)
            events = [_line(event) for part in self.parts if (event := self.answer.event(part)) is not None]
            if failed is not None:
                events.append(_line(refusal(failed).body))
            elif ended:
                if self.answer.include_usage:
                    events.append(_line(self.answer.usage_event(jobs)))
                events.append(b"data: [DONE]\n\n")
            if not begun:
                await send({"type": "http.response.start", "status": 200, "headers": EVENT_HEADERS})
                begun = True
            await send({"type": "http.response.body", "body": b"".join(events), "more_body": not ended})
            if not ended:
                step, streams = self.api.engine.step_seconds / STEP_EVENTS, self.api.streams
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(EVENT_SECONDS * max(16, streams), step * streams)):
                        await news.over.wait()


def _line(event: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def _gone(receive: Any) -> None:
    """Returns when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
