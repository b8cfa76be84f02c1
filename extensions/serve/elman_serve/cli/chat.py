"""`elman chat`: a conversation in the terminal."""

from __future__ import annotations

import codecs
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer

from elman_core.extension import ConfigError, Precision, print, printable

Reply = Callable[[list[dict[str, Any]]], Iterator[str]]


def chat(
    model: Annotated[
        str, typer.Argument(help="A run, a checkpoint folder, pretrained/NAME, a hub id, or a server's URL.")
    ],
    count: Annotated[int, typer.Option("-n", "--bytes", min=1, help="Most bytes of an answer.")] = 500,
    temperature: Annotated[float, typer.Option("-t", "--temperature", help="0 takes the most likely byte.")] = 0.8,
    top_p: Annotated[float, typer.Option("--top-p", help="Draw from the likeliest bytes that add up to p.")] = 0.9,
    device: Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu, cuda, cuda:1.")] = "auto",
    dtype: Annotated[Precision | None, typer.Option(help="Dtype of the weights. [default: as elman generate]")] = None,
) -> None:
    """Talk to a model, or to a server (http://127.0.0.1:8000/v1, its key in OPENAI_API_KEY).

    A model without a chat template continues the whole conversation as one text. ^D ends it.
    """
    how = {"temperature": temperature, "top_p": top_p}
    reply = _from_server(model, count, how) if model.startswith(("http://", "https://")) else None
    reply = reply or _from_model(model, count, how, device, dtype)
    messages: list[dict[str, Any]] = []
    while True:
        try:
            said = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        messages.append({"role": "user", "content": said})
        answer = ""
        try:
            for text in reply(messages):
                answer += text
                print(printable(text, "\n\t"), end="", flush=True)
        except KeyboardInterrupt:
            pass  # enough of this answer
        print()
        messages.append({"role": "assistant", "content": answer})


def _plain(messages: list[dict[str, Any]]) -> str:
    """The conversation as one text."""
    return "".join(f"{m['content']}\n" if m["role"] == "user" else f"{m['content'].rstrip()}\n" for m in messages)


def _from_model(model: str, count: int, how: dict[str, float], device: str, dtype: Precision | None) -> Reply:
    import threading

    from elman_core.extension import Sampling, load_tokenizer, load_writer
    from elman_serve.cli.serve import _set, _template
    from elman_serve.engine import Engine, Request

    ladder, ends = load_writer(model, device, dtype)
    template = _template(load_tokenizer(ladder)) or _plain
    engine = Engine(ladder, ends, slots=1, queue=1, prefix_bytes=64 << 20, notify=_set)
    engine.start()

    def reply(messages: list[dict[str, Any]]) -> Iterator[str]:
        changed, decoder, sent = threading.Event(), codecs.getincrementaldecoder("utf-8")("replace"), 0
        request = Request(template(messages).encode(), Sampling(how["temperature"], top_p=how["top_p"]), count, changed)
        engine.submit(request)
        try:
            while not (done := request.done) or sent < request.texts[0].shown:
                if not done:
                    changed.wait()
                    changed.clear()
                shown = request.texts[0].shown
                yield decoder.decode(bytes(request.texts[0].text[sent:shown]))
                sent = shown
        finally:
            request.cancel()
        if request.error is not None:
            raise request.error

    return reply


def _from_server(url: str, count: int, how: dict[str, float]) -> Reply:
    import urllib.error
    import urllib.request

    base = url.rstrip("/").removesuffix("/v1")
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"

    def ask(path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        try:
            return urllib.request.urlopen(urllib.request.Request(base + path, data, headers))
        except urllib.error.HTTPError as error:
            said = json.loads(error.read() or b"{}").get("error", {}).get("message", error.reason)
            raise ConfigError(f"{base} refuses: {said}") from error
        except OSError as error:
            raise ConfigError(f"{base} does not answer: {getattr(error, 'reason', error)}") from error

    name = json.load(ask("/v1/models"))["data"][0]["id"]
    chats = "/v1/chat/completions" in json.load(ask("/openapi.json"))["paths"]
    common = {"model": name, "stream": True, "max_tokens": count, **how}

    def reply(messages: list[dict[str, Any]]) -> Iterator[str]:
        own = {"messages": messages} if chats else {"prompt": _plain(messages)}
        with ask("/v1/chat/completions" if chats else "/v1/completions", {**common, **own}) as lines:
            for line in lines:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise ConfigError(f"{base}: {event['error']['message']}")
                for choice in event["choices"]:
                    yield choice["delta"].get("content", "") if chats else choice["text"]

    return reply
