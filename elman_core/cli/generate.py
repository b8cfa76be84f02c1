"""`elman generate`: text from a model."""

from __future__ import annotations

import codecs
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from elman_core.registry import ConfigError, DataError
from elman_core.registry.errors import printable
from elman_core.storage import read_bytes

from ._text import print
from .export import DTYPES, Precision

Storage = Literal[Precision, "int8"]
"""Storage of the weights that a text is written with."""

SMALL = 2**25
"""Parameters below which one thread decodes faster than several: waking the others takes longer than a product."""


def generate(
    model: Annotated[str, typer.Argument(help="A run, a checkpoint folder, pretrained/NAME or a hub id.")],
    source: Annotated[str | None, typer.Argument(metavar="[-]", help="'-' reads the prompt from stdin.")] = None,
    prompt: Annotated[str | None, typer.Option("-p", "--prompt", help="Text to continue.")] = None,
    file: Annotated[Path | None, typer.Option("-f", "--file", help="File to continue, as raw bytes.")] = None,
    count: Annotated[
        int, typer.Option("-n", "--bytes", min=0, help="Most bytes to write; of a model with a tokenizer, most tokens.")
    ] = 500,
    temperature: Annotated[float, typer.Option("-t", "--temperature", help="0 takes the most likely byte.")] = 0.8,
    top_k: Annotated[int, typer.Option("--top-k", help="Draw from the k likeliest bytes; 0: all.")] = 40,
    top_p: Annotated[
        float, typer.Option("--top-p", help="Draw from the likeliest bytes whose probabilities add up to p.")
    ] = 0.9,
    rep_penalty: Annotated[float, typer.Option("--rep-penalty", help="Penalty on bytes that occurred; 1: none.")] = 1.0,
    stop: Annotated[
        str | None,
        typer.Option(
            help="What ends a sample: a byte (0x1e, 10, a character), a token of a tokenizer, or none. [default: the model's]"
        ),
    ] = None,
    num: Annotated[int, typer.Option("--num", min=1, max=65536, help="Number of samples.")] = 1,
    seed: Annotated[int | None, typer.Option("--seed", help="Seed that makes samples repeatable.")] = None,
    device: Annotated[str, typer.Option("--device", help="auto (a GPU if there is one), cpu, cuda, cuda:1.")] = "auto",
    dtype: Annotated[
        Storage | None,
        typer.Option(
            "--dtype",
            help="Dtype of the weights; int8: rounded, for a CPU. [default: bf16 on a GPU that supports it, as in training; "
            "else as saved]",
        ),
    ] = None,
) -> None:
    """Continue a prompt with a model.

    A terminal shows the prompt before the new text; a pipe or a file gets the new bytes alone, as the model wrote them.
    """
    from elman_core.generation import Sampling, generate_tokens

    text = _prompt(source, prompt, file)
    how = Sampling(temperature, top_k, top_p, rep_penalty)
    ladder, ends = load_writer(model, device, dtype)
    unit = "byte" if ladder.config.vocab_size == 256 else "token"
    tokens, texts, tokenizer = _language(ladder, text)
    stops = ends if stop is None else _stops(stop, tokenizer)
    write = _writer()
    terminal = sys.stdout.isatty()
    echo = text if prompt is not None and terminal else b""
    samples: list[bytearray] = [bytearray() for _ in range(num)]
    lengths = [0] * num
    if num == 1:
        write(echo)
    for row in generate_tokens(ladder, tokens, max_new_tokens=count, num=num, how=how, stop=stops, seed=seed):
        for i, token in enumerate(row):
            if token is not None:
                lengths[i] += 1
                samples[i] += texts[token]
                if num == 1:
                    write(texts[token])
    if num == 1:
        write(b"\n" if terminal else b"")
    else:
        for index, sample in enumerate(samples, 1):
            write(b"--- %d of %d\n%b%b\n" % (index, num, echo, bytes(sample)))
    early = [length for length in lengths if length < count]
    if early:
        which = "the sample" if num == 1 else f"{len(early)} of {num} samples"
        named = " or ".join(f"0x{s:02x}" if tokenizer is None else repr(tokenizer.decode([s])) for s in sorted(stops))
        print(
            f"elman: {which} ended after {min(early):,} of {count:,} {unit}s, at the stop {unit} {named}; "
            "--stop none continues past it",
            file=sys.stderr,
        )


def load_writer(model: str, device: str, dtype: Storage | None) -> tuple[Any, set[int]]:
    """The model that `elman generate` computes with, and the bytes that end a text of it. Sets the number of threads, and that
    MKL sums every row of a product alike (docs/decisions/0050)."""
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")  # read at its first product
    import torch

    from elman_core.generation import round_to_int8
    from elman_core.model.checkpoint import load_checkpoint
    from elman_core.training.precision import pick_device

    chosen = pick_device(device)
    if dtype == "int8" and chosen.type != "cpu":
        raise ConfigError(f"int8 weights are for a CPU, not {chosen}: give --device cpu or another --dtype")
    ladder = load_checkpoint(model, device=chosen, dtype=_storage(dtype, chosen))
    if dtype == "int8":
        round_to_int8(ladder)
    if chosen.type == "cpu" and ladder.num_parameters() < SMALL:
        torch.set_num_threads(1)
    eos = ladder.generation_config.eos_token_id  # that of transformers' `generate()`
    if eos is None:
        return ladder, set()
    return ladder, set(eos) if isinstance(eos, list) else {eos}


def _language(ladder: Any, text: bytes) -> tuple[Sequence[int], list[bytes], Any]:
    """The prompt as tokens, the text of each token, and the tokenizer, None for bytes."""
    from elman_core.model.tokenizer import load_tokenizer, vocabulary_texts

    vocab = ladder.config.vocab_size
    if vocab == 256:
        return text, vocabulary_texts(None, vocab), None
    tokenizer: Any = load_tokenizer(ladder)
    try:
        tokens = tokenizer(text.decode(), add_special_tokens=False).input_ids
    except UnicodeDecodeError as error:
        raise DataError(f"the prompt is not UTF-8 at byte {error.start}, which this model's tokenizer needs") from error
    return tokens, vocabulary_texts(tokenizer, vocab), tokenizer


def _storage(asked: Storage | None, device: Any) -> str | None:
    """The dtype of the weights; None: as saved."""
    if asked is None:
        from elman_core.training.precision import has_bf16

        return "bfloat16" if has_bf16(device) else None
    return DTYPES["fp32" if asked == "int8" else asked]  # rounded afterwards


def _writer() -> Callable[[bytes], None]:
    """Return a function that writes bytes: as they are into a pipe or a file, as harmless text on a terminal."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    raw = None if sys.stdout.isatty() else getattr(sys.stdout, "buffer", None)

    def write(text: bytes) -> None:
        if raw is not None:
            raw.write(text)
        else:
            sys.stdout.write(printable(decoder.decode(text), "\n\t"))
        sys.stdout.flush()

    return write


def _prompt(source: str | None, prompt: str | None, file: Path | None) -> bytes:
    if source not in (None, "-"):
        raise ConfigError(f"unexpected {source!r}: give a prompt with -p TEXT, -f FILE, or - for standard input")
    if sum(x is not None for x in (source, prompt, file)) > 1:
        raise ConfigError("give one prompt: -p TEXT, -f FILE, or - for standard input")
    if source == "-":
        return sys.stdin.buffer.read()
    if file is not None:
        try:
            return read_bytes(file)
        except OSError as error:
            hint = " (- reads standard input)" * file.is_fifo()
            raise DataError(f"{file} cannot be read: {error.strerror}{hint}") from error
    return os.fsencode(prompt or "")


def _stops(text: str, tokenizer: Any) -> set[int]:
    """The token, or without a tokenizer the byte, that `--stop` names."""
    if text.lower() == "none":
        return set()
    if tokenizer is not None:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        if len(ids) != 1:
            raise ConfigError(f"--stop takes one token of this model, or none; {text!r} is {len(ids)} tokens")
        return set(ids)
    try:
        value = int(text, 0)
    except ValueError:
        value = ord(text) if len(text) == 1 and text.isascii() else -1  # others take several bytes
    if not 0 <= value < 256:
        raise ConfigError(f"--stop takes a byte such as 0x1e, 10 or an ASCII character, or none, not {text!r}")
    return {value}
