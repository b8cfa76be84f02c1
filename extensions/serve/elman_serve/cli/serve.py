"""`elman serve`: a model for many clients."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from elman_core.extension import ConfigError, Storage, print


def serve(
    model: Annotated[str, typer.Argument(help="A run, a checkpoint folder, pretrained/NAME or a hub id.")],
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0: all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: a free one.")] = 8000,
    name: Annotated[str | None, typer.Option(help="Name of the model. [default: the last part of MODEL]")] = None,
    key_file: Annotated[Path | None, typer.Option(help="File with the key that clients must send.")] = None,
    slots: Annotated[int, typer.Option(min=1, max=4096, help="Texts written at once.")] = 64,
    queue: Annotated[int, typer.Option(min=1, help="Most prompts that wait.")] = 1024,
    max_prompt: Annotated[int, typer.Option(min=1, help="Most tokens of a prompt.")] = 65536,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a text.")] = 16384,
    timeout: Annotated[float, typer.Option(min=0.1, help="Most seconds of a request.")] = 600,
    prefix_mib: Annotated[int, typer.Option(min=0, help="MiB for states after prefixes of prompts.")] = 256,
    device: Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu, cuda, cuda:1.")] = "auto",
    dtype: Annotated[Storage | None, typer.Option(help="Dtype of the weights. [default: as elman generate]")] = None,
) -> None:
    """Serve a model to many clients, with the routes of OpenAI's API.

    A prompt, settings and a seed give the text of `elman generate`, whatever else runs. SIGTERM finishes running requests.
    """
    import asyncio
    import gc

    import uvicorn

    from elman_core.extension import load_writer
    from elman_serve.api import Api
    from elman_serve.engine import Engine
    from elman_serve.language import Language
    from elman_serve.schema import Limits
    from elman_serve.states import independent

    key = None if key_file is None else _key(key_file)
    listening = _listen(host, port)
    ladder, ends = load_writer(model, device, dtype)
    loop = asyncio.new_event_loop()

    def notify(changed: list[Any]) -> None:
        loop.call_soon_threadsafe(_set, changed)
        if engine.failure is not None:
            server.should_exit = True

    steps, together = independent(ladder, slots) if ladder.device.type == "cpu" else (True, True)
    engine = Engine(
        ladder, ends, Language.of(ladder), slots=slots, queue=queue, prefix_bytes=prefix_mib << 20, notify=notify,
        together=together,
    )  # fmt: skip
    if not steps:
        print(
            "elman: on this machine the bits of a row depend on the size of the batch: "
            "texts can differ from those of elman generate in a last digit",
            file=sys.stderr,
        )
    called = name or Path(os.path.abspath(model)).name  # of "." that of the folder
    limits = Limits(max_prompt, max_tokens, min(slots, 128), ladder.config.vocab_size)
    api = Api(engine, called, limits, seconds=timeout, key=key)
    config = uvicorn.Config(
        api, http="h11", ws="none", lifespan="off", log_level="error", access_log=False, server_header=False,
        timeout_graceful_shutdown=int(timeout) + 1,
    )  # fmt: skip
    server = uvicorn.Server(config)
    gc.collect()
    gc.freeze()  # else each full collection walks through torch, and all streams wait a quarter of a second
    engine.start()
    at = listening.getsockname()
    print(f"elman: {called} at http://{f'[{at[0]}]' if ':' in at[0] else at[0]}:{at[1]}/v1, {slots} slots; ^C ends it")
    sys.stdout.flush()
    if key is None and at[0] not in ("127.0.0.1", "::1"):
        print("elman: other machines can reach it, and no key is asked: --key-file FILE", file=sys.stderr)

    try:
        loop.run_until_complete(server.serve(sockets=[listening]))
    finally:
        engine.close()
        engine.join(10)
    if engine.failure is not None:
        raise engine.failure


def _set(changed: list[Any]) -> None:
    for each in changed:
        each.set()


def _key(path: Path) -> str:
    try:
        key = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"{path} cannot be read as a key: {getattr(error, 'strerror', None) or 'it is not ASCII'}"
        ) from error
    if not key or any(char.isspace() for char in key):
        raise ConfigError(f"{path} must hold one key: a word without spaces")
    return key


def _listen(host: str, port: int) -> socket.socket:
    """A socket that sends at once, and drops a client which has taken nothing for a minute; there is room for as many as the
    system allows."""
    try:
        made = socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=2048
        )
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot listen at {host}, port {port}: {getattr(error, 'strerror', None) or error}; give another --port or --host"
        ) from error
    # asyncio sets this only on sockets that name their protocol
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 60_000)
    if os.name == "posix":
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return made
