"""`elman chat`: a conversation in the terminal."""

from __future__ import annotations

import io
import sys
from typing import Annotated, Any

import typer

from elman_core.extension import Storage, print, printable


def chat(
    model: Annotated[str, typer.Argument(help="A run, a checkpoint folder, pretrained/NAME or a hub id.")],
    count: Annotated[int, typer.Option("-n", "--tokens", min=1, help="Most tokens of an answer.")] = 500,
    temperature: Annotated[float, typer.Option("-t", "--temperature", help="0 takes the most likely token.")] = 0.8,
    top_p: Annotated[float, typer.Option("--top-p", help="Draw from the likeliest tokens that add up to p.")] = 0.9,
    device: Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu, cuda, cuda:1.")] = "auto",
    dtype: Annotated[Storage | None, typer.Option(help="Dtype of the weights. [default: as elman generate]")] = None,
) -> None:
    """Talk to a model.

    A model without a chat template continues the whole conversation as one text. ^D ends it.
    """
    import threading

    from elman_core.extension import Sampling, load_writer
    from elman_serve.answers import Part
    from elman_serve.cli.serve import _set
    from elman_serve.engine import Engine
    from elman_serve.language import Language
    from elman_serve.request import Request

    ladder, ends = load_writer(model, device, dtype)
    language = Language.of(ladder)
    template = language.template or _plain
    engine = Engine(ladder, ends, language, slots=1, queue=1, prefix_bytes=64 << 20, notify=_set)
    engine.start()
    messages: list[dict[str, Any]] = []
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    while True:
        try:
            said = input("> " if sys.stdin.isatty() else "").encode(errors="surrogateescape").decode(errors="replace")
        except EOFError:
            return
        messages.append({"role": "user", "content": said})
        prompt, changed = language.encode(template(messages)), threading.Event()
        request = Request(prompt, Sampling(temperature, top_p=top_p), count, changed)
        part, answer = Part(request.texts[0], 0, False, language.texts), ""
        engine.submit(request)
        try:
            while part.finish is None and request.error is None:
                changed.wait()
                changed.clear()
                text = part.more()
                answer += text
                print(printable(text, "\n\t"), end="", flush=True)
        except KeyboardInterrupt:
            request.cancel()  # enough of this answer
        if request.error is not None:
            raise request.error
        print()
        messages.append({"role": "assistant", "content": answer})


def _plain(messages: list[dict[str, Any]]) -> str:
    """The conversation as one text."""
    return "".join(f"{m['content']}\n" if m["role"] == "user" else f"{m['content'].rstrip()}\n" for m in messages)
