"""`elman data pack`: texts of many forms become one file to train on."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path

import typer

from elman_core.extension import ConfigError, print, read_bytes, require_text, write_text


def pack(
    inputs: list[str] = typer.Argument(metavar="INPUT...", help="Files, folders, globs, data sets saved by datasets."),
    out: Path = typer.Option(help="The packed file; its manifest is written beside it."),
    field: str | None = typer.Option(
        None, help="The field of a record that is its text; by default text, or prompt and completion, or messages."
    ),
    tokenizer: Path | None = typer.Option(None, help="A tokenizer.json, or a folder with one; bytes by default."),
    template: Path | None = typer.Option(
        None, help="A chat template (Jinja) for messages; the tokenizer's by default."
    ),
    seed: int = typer.Option(0, min=0, help="Decides the order of documents."),
    unique: bool = typer.Option(
        False, "--drop-duplicates", help="Keep only one of several documents with the same text."
    ),
) -> None:
    """Pack texts into one memory-mapped file. Takes .txt, .md, .jsonl, .gz, .zst, .parquet, .arrow, folders of datasets.

    Documents are in random order, each ended by 0x1e, or by the tokenizer's eos. In records with `prompt` and `completion`, or
    with `messages`, only what the model should answer counts in the loss. What was packed before a kill is not packed again.
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    from elman_core.extension import packed_manifest
    from elman_data.encode import How, read_tokenizer
    from elman_data.inputs import find, units
    from elman_data.packing import pack as pack_units

    require_text(out)
    if out.is_dir():
        raise ConfigError(f"{out} is a folder: --out is a file, such as {out / 'corpus.bin'}")
    killed = out.with_name(f".{out.name}.packing").is_dir()  # perhaps between the two names that it gives
    manifest = packed_manifest(out)
    for path, known in ((out, killed and manifest.exists()), (manifest, killed)):
        if path.exists() and not known:
            raise ConfigError(f"{path} exists: nothing is overwritten; choose another --out")
    files, passed = find(inputs)
    how = How(field=field)
    facts: dict[str, object] = {"tokenizer": None}
    if tokenizer is not None:
        source, vocab_size, separator, own, names = read_tokenizer(tokenizer)
        how = How(field, str(source.resolve()), separator, vocab_size, own, names)
        facts["tokenizer"] = _beside(source, out)
    if template is not None:
        how = replace(how, template=text_of(template))
    if how.template is not None:
        facts["chat_template"] = how.template
    found = list(units(files))
    total = sum(unit.size for unit in found)
    columns = (BarColumn(bar_width=None), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=total)
        made = pack_units(found, how, out, seed, unique, facts, lambda size: bar.advance(task, size))
    dropped = [f"{made[k]:,} {word}" for k, word in (("empty", "empty"), ("duplicates", "duplicates")) if made[k]]
    print(
        f"{out}: {made['documents']:,} documents, {made['tokens']:,} {'bytes' if tokenizer is None else 'tokens'} "
        f"from {len(files):,} file{'s' * (len(files) != 1)}"
        + (f"; left out: {', '.join(dropped)}" if dropped else "")
        + (f"; {passed:,} other file{'s' * (passed != 1)} passed over" if passed else "")
    )
    print(f"train on it: elman train e42 --data {shlex.quote(str(out))}")


def _beside(source: Path, out: Path) -> dict[str, str]:
    """Copy a tokenizer beside the packed file. Raises `ConfigError` if another one is there."""
    import hashlib

    out.parent.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        if not (source.parent / name).is_file():
            continue
        content, place = read_bytes(source.parent / name), out.parent / name
        if place.exists() and read_bytes(place) != content:
            raise ConfigError(f"{place} is of another tokenizer: choose another folder for --out")
        if not place.exists():
            write_text(place, content.decode())
    return {"path": "tokenizer.json", "sha256": hashlib.sha256(read_bytes(source)).hexdigest()}


def text_of(path: Path) -> str:
    try:
        return read_bytes(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
