"""`elman export`: a checkpoint of a run as a separate folder, for publishing or in another precision."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from elman_core.registry import ConfigError, DivergedError
from elman_core.storage import read_bytes, write_folder, write_json

from ._text import print
from .evaluate import EXPORTED, how_evaluated

CARRIED = (
    "README.md", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*", "vocab.*", "merges.txt",
)  # fmt: skip
"""Files of a checkpoint beside its weights: card, tokenizer, chat template."""

Precision = Literal["fp32", "bf16", "fp16"]
"""Storage of the weights."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}


def export(
    run: Annotated[str, typer.Argument(help="A run, or one of its checkpoint folders.")],
    out: Annotated[Path, typer.Argument(help="A new folder.")],
    dtype: Annotated[Precision | None, typer.Option(help="Storage of the weights. [default: as saved]")] = None,
    licence: Annotated[
        str | None,
        typer.Option("--license", help="Licence in the model card, such as apache-2.0. [default: left open]"),
    ] = None,
) -> None:
    """Write a model without its training state. Nothing is overwritten, and OUT appears whole or not at all."""
    from elman_core.model import no_progress_bars
    from elman_core.model.card import set_licence
    from elman_core.model.checkpoint import find_checkpoint, load_checkpoint

    said = ""

    def fill(folder: Path) -> None:
        nonlocal said
        source = find_checkpoint(run)
        model = load_checkpoint(source, dtype=None if dtype is None else DTYPES[dtype])
        if odd := next((name for name, tensor in model.state_dict().items() if not tensor.isfinite().all()), None):
            raise DivergedError(f"{source} has numbers that are not finite in {str(model.dtype)[6:]}, such as in {odd}")
        for file in (f for pattern in CARRIED for f in source.glob(pattern)):
            (folder / file.name).write_bytes(read_bytes(file))
        model.save_pretrained(folder)
        if known := how_evaluated(source):  # without the place of the text, which is of this machine
            data = {name: known[name] for name in ("heldout", "eval_bytes")}
            settings = {"data": data, "train": {"chunk_size": known["chunk_size"]}}
            write_json(folder / EXPORTED, {"settings": settings, "text": known["text"]})
        if licence is not None:
            set_licence(folder, licence)
        parameters = sum(p.numel() for p in model.parameters())
        said = f"{out}: {parameters:,} parameters in {str(model.dtype).removeprefix('torch.')}, from {source}"

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists: nothing is overwritten; choose another name")
    with no_progress_bars():
        write_folder(out, fill)  # makes the folder first: an OUT that cannot be written costs nothing
    print(said)
