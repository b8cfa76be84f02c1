"""The bodies of requests as JSON Schema: what the OpenAPI document says is what is checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Limits:
    """What a request may ask for.

    Attributes:
        prompt: tokens. tokens: to write, of each text. texts: of one prompt, and prompts of a request. body: its bytes.
        vocab: how many tokens there are.
    """

    prompt: int
    tokens: int
    texts: int
    vocab: int = 256

    @property
    def body(self) -> int:
        return 6 * self.prompt + 65536  # JSON may write a byte as \u0000


def _optional(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": [kind, "null"], **more}


def _only(*values: Any) -> dict[str, Any]:
    return {"enum": [*values, None], "description": "Not supported: accepted where it changes nothing."}


def _common(limits: Limits) -> dict[str, Any]:
    return {
        "model": {"type": "string", "description": "One of /v1/models."},
        "n": _optional("integer", minimum=1, maximum=limits.texts, default=1),
        "temperature": _optional("number", minimum=0, maximum=100, default=1),
        "top_p": _optional("number", exclusiveMinimum=0, maximum=1, default=1),
        "top_k": _optional("integer", minimum=0, maximum=limits.vocab, default=0),
        "repetition_penalty": _optional("number", minimum=1e-6, maximum=100, default=1),
        "seed": _optional("integer", minimum=-(2**63), maximum=2**64 - 1, description="As of `elman generate --seed`."),
        "stop": {
            "anyOf": [
                {"type": "null"},
                {"type": "string", "minLength": 1, "maxLength": 256},
                {"type": "array", "maxItems": 4, "items": {"type": "string", "minLength": 1, "maxLength": 256}},
            ]
        },
        "stream": _optional("boolean", default=False),
        "stream_options": _optional(
            "object",
            properties={"include_usage": _optional("boolean")},
            additionalProperties=False,
            description="Only with `stream` = true.",
        ),
        "return_token_ids": _optional("boolean", default=False, description="Also return the tokens as numbers."),
        "user": _optional("string", maxLength=1024),
        "frequency_penalty": _only(0),
        "presence_penalty": _only(0),
        "logit_bias": _only({}),
    }


def completion(limits: Limits) -> dict[str, Any]:
    """The body of /v1/completions."""
    tokens = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": limits.vocab - 1}}
    prompts = {
        "description": "Text, tokens as numbers, or several of either. An empty text is the start of a document.",
        "anyOf": [
            {"type": "string"},
            tokens,
            {"type": "array", "minItems": 1, "maxItems": limits.texts, "items": {"type": "string"}},
            {"type": "array", "minItems": 1, "maxItems": limits.texts, "items": tokens},
        ],
    }
    more = {
        "prompt": prompts,
        "max_tokens": _optional("integer", minimum=0, maximum=limits.tokens, default=min(16, limits.tokens)),
        "logprobs": _optional("integer", minimum=0, maximum=20),
        "echo": _optional("boolean", default=False),
        "best_of": _optional("integer", minimum=1, maximum=limits.texts, description="Only the same as `n`."),
        "suffix": _only(""),
    }
    return _object({**_common(limits), **more}, "model", "prompt")


def chat(limits: Limits) -> dict[str, Any]:
    """The body of /v1/chat/completions."""
    part = {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
        "required": ["type", "text"],
        "additionalProperties": False,
    }
    message = {
        "type": "object",
        "properties": {
            "role": {"enum": ["system", "developer", "user", "assistant"]},
            "content": {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": part}]},
            "name": {"type": "string", "maxLength": 64},
        },
        "required": ["role", "content"],
        "additionalProperties": False,
    }
    more = {
        "messages": {"type": "array", "minItems": 1, "maxItems": 1024, "items": message},
        "max_tokens": _optional("integer", minimum=1, maximum=limits.tokens),
        "max_completion_tokens": _optional("integer", minimum=1, maximum=limits.tokens, default=limits.tokens),
        "logprobs": _optional("boolean", default=False),
        "top_logprobs": _optional("integer", minimum=0, maximum=20, description="Only with `logprobs` = true."),
        "tools": _only([]),
        "response_format": _only({"type": "text"}),
    }
    return _object({**_common(limits), **more}, "model", "messages")


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": False}


def _answer(description: str, *kinds: str) -> dict[str, Any]:
    return {"description": description, "content": {kind: {"schema": {}} for kind in kinds}}


def document(version: str, bodies: dict[str, dict[str, Any]], keyed: bool) -> dict[str, Any]:
    """The OpenAPI document.

    Args:
        bodies: the schema of the body of every path that takes one. keyed: whether a key is asked for.
    """
    error = {
        "type": "object",
        "required": ["error"],
        "properties": {"error": {"type": "object", "required": ["message", "type", "param", "code"]}},
    }
    wrong = {
        status: {"description": said, "content": {"application/json": {"schema": error}}}
        for status, said in {
            "400": "The body is not as described.", "401": "No key, or a wrong one.", "404": "No such model.",
            "408": "The body did not come in time.", "413": "The body is too large.", "415": "The body is not JSON.",
            "429": "Too many prompts are waiting.", "500": "The model failed.", "503": "The server is ending.",
            "504": "The text was not complete in time.",
        }.items()
    }  # fmt: skip
    texts = _answer("The texts; events if `stream` is true.", "application/json", "text/event-stream")
    paths: dict[str, Any] = {
        path: {
            "post": {
                "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
                "responses": {"200": texts, **wrong},
            }
        }
        for path, schema in bodies.items()
    }
    for path, said, kind in (
        ("/v1/models", "The model.", "application/json"),
        ("/health", "Whether the model is running.", "application/json"),
        ("/metrics", "Counters for Prometheus.", "text/plain"),
    ):
        answers = {"200": _answer(said, kind), **{status: wrong[status] for status in ("401", "503")}}
        paths[path] = {"get": {"responses": answers, **({"security": []} if path == "/health" else {})}}
    made: dict[str, Any] = {"openapi": "3.1.0", "info": {"title": "elman serve", "version": version}, "paths": paths}
    if keyed:
        made |= {
            "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
            "security": [{"key": []}],
        }
    return made
