"""Train tokenizers."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator
from pathlib import Path

import typer

from elman_core.extension import ConfigError, print, write_folder

group = typer.Typer(help=__doc__, no_args_is_help=True)


@group.command()
def train(
    inputs: list[str] = typer.Argument(metavar="INPUT...", help="Texts, as `elman data pack` takes them."),
    out: Path = typer.Option(help="A new folder, which transformers loads."),
    vocab: int = typer.Option(8192, min=258, help="Tokens, with one for each byte, <|endoftext|> and <|pad|>."),
    field: str | None = typer.Option(None, help="The field of a record that is its text."),
    template: Path | None = typer.Option(None, help="A chat template (Jinja) to keep with the tokenizer."),
) -> None:
    """Train a byte-level BPE, which encodes every text. It is made by the library tokenizers; <|endoftext|> ends documents."""
    from elman_data.encode import Encoder, How, train_bpe
    from elman_data.inputs import documents, find, units

    from .pack import text_of

    if out.exists():
        raise ConfigError(f"{out} exists: nothing is overwritten; choose another --out")
    chat = None if template is None else text_of(template)
    files, _ = find(inputs)
    encoder = Encoder(How(field, template=chat, names={}))

    def texts() -> Iterator[str]:
        for unit in units(files):
            for document in documents(unit):
                for text, _ in encoder.pieces(document, unit.paths[0]):
                    content = text.encode(errors="replace") if isinstance(text, str) else bytes(text)
                    yield content.decode(errors="replace")

    found = filter(None, texts())
    if (first := next(found, None)) is None:
        raise ConfigError("there is no text in these inputs: every document is empty")
    tokenizer = train_bpe(itertools.chain([first], found), vocab, chat)
    write_folder(out, tokenizer.save_pretrained)
    print(
        f"{out}: {len(tokenizer):,} tokens"
        + (", all that these texts give" if len(tokenizer) < vocab else "")
        + f"; pack texts with it: elman data pack {shlex.join(inputs)} --tokenizer {shlex.quote(str(out))} --out FILE"
    )
