"""`elman eval`: bits per byte."""

from __future__ import annotations

import contextlib
import json
import math
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import typer

from elman_core.registry import CheckpointError, ConfigError, DataError, DivergedError, check_value
from elman_core.storage import read_json

from ._text import print


def eval_(
    model: str = typer.Argument(help="A run, a checkpoint folder, pretrained/NAME or a hub id."),
    data: Path | None = typer.Option(None, help="The text; by default that of the run."),
    everything: bool = typer.Option(False, "--all", help="Score every byte of the file, with a carried state."),
    window: int | None = typer.Option(
        None, min=1, help="Bytes scored in a window; by default as in the run, or as the model recommends."
    ),
    most: int | None = typer.Option(
        None, "--bytes", min=1, help="Most bytes to score; by default as in the run, or 1 MiB; all with --all."
    ),
    heldout: float | None = typer.Option(None, help="Fraction held out; by default as in the run, or 0.01."),
    rows: int = typer.Option(16, min=1, help="Windows (or, with --all, parts of the file) side by side."),
    precision: Literal["fp32", "bf16"] = typer.Option("fp32", help="What the model computes in."),
    device: str = typer.Option("auto", help="auto, cpu, cuda, cuda:1."),
    json_: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Measure bits per byte of MODEL on held-out text, or on all of it.

    Each held-out window starts from the initial state, as in training. With --all, the file is cut into ROWS parts that are
    read side by side with a carried state: each byte but the first is predicted from all bytes before it in its part.
    """
    from elman_core.data import combined
    from elman_core.training.settings import DataSettings
    from elman_core.training.text import open_heldout, open_parts

    asked = how_evaluated(Path(model))
    read = asked.get("text")  # by the training
    path = str(data) if data else None
    if data is None and read:
        path = asked.get("path")
    if path is None:
        raise DataError(f"{model} is not a run, its text is unknown: correct the path, or give a text with --data FILE")
    other = asked.get("heldout_file", "") if data is None and heldout is None and not everything else ""
    parts, held = open_parts(DataSettings(path=path, heldout_file=other))
    size = window or asked.get("chunk_size") or 1
    found = combined([part.fingerprint(size) for part in parts], [part.weight for part in parts])
    if held:
        found["heldout_file"] = held.fingerprint(size)
    elif read:
        read.pop("heldout_file", None)
    if data is None and found != read:
        raise DataError(f"{path} is no longer the text of this run; to score it anyway, use --data {path}")
    fraction = heldout if heldout is not None else asked.get("heldout", 0.01)
    file = parts[0].file
    if everything and (file is None or len(parts) > 1):
        raise ConfigError("--all scores one file: name it with --data FILE")
    if not everything:  # what is wrong with these is said before torch is imported
        length = min((h.length for _, h in open_heldout(parts, held, fraction, size, None)), default=0)
        if not length:
            raise ConfigError(
                f"nothing is held out of {path}: --all scores all of it, --heldout 0.1 a tenth, --data FILE another text"
            )
        if window and length < window:
            raise ConfigError(f"--window {window}: held-out stretches have {length} bytes; give at most that, or --all")

    from elman_core.model.checkpoint import load_checkpoint
    from elman_core.training.begin import tokens_of
    from elman_core.training.evaluate import in_tokens, on_everything, on_mixture
    from elman_core.training.precision import compute_in, pick_device

    chosen = pick_device(device)
    ladder: Any = load_checkpoint(model, device=chosen)
    length = window or asked.get("chunk_size") or ladder.config.max_position_embeddings
    tokenizer, sizes, raw = tokens_of(ladder, [*parts, held] if held else parts, length)
    if raw and everything:
        pack = shlex.join(
            ["elman", "data", "pack", parts[0].value, "--tokenizer", ladder.name_or_path, "--out", "tokens.bin"]
        )
        raise ConfigError(f"--all reads this model's tokens: {pack}, then --data tokens.bin")
    with compute_in(precision, chosen):
        if everything:
            assert file is not None
            result = on_everything(ladder, file, length, rows, most, sizes=sizes, counted=_counted)
        else:
            scored = open_heldout(parts, held, fraction, length, most or asked.get("eval_bytes", 2**20))
            length = min(h.length for _, h in scored)
            if raw:
                scored = [(weight, in_tokens(h, tokenizer)) for weight, h in scored]
            result = on_mixture(ladder, scored, rows, sizes=sizes, counted=_counted)
    if not math.isfinite(result["loss"]):
        raise DivergedError(f"the loss of {model} is {result['loss']}: its weights or its activations are not finite")
    if everything:
        part, how = "all", "all, the state carried"
    elif held:
        part, how = "held out", f"of {held.value}, held out"
    elif read is None:
        part, how = "unknown", "held out only if its training held them out"
    elif read != found:
        part, how = "another text", "of another text than its training's"
    elif all(p.split(fraction).heldout_bytes <= p.split(asked["heldout"]).heldout_bytes for p in parts if p.file):
        part, how = "held out", "held out"  # what its training held out contains these
    else:
        part, how = "not held out", "not held out: its training may have read them"
    result |= {"part": part, "window": length, "data": str(path), "model": model}
    if json_:
        print(json.dumps(result))
        return
    if not everything:
        how += f", windows of {length}"
    nats = f"{result['loss']:.4f} nats{' a token' if 'tokens' in result else ''}"
    print(f"{result['bits_per_byte']:.4f} bits per byte  ({nats}; {result['bytes']:,} bytes {how})")


def _counted(batches: Sequence[int]) -> Iterator[int]:
    """The batches, counted on a terminal with the time that is left."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    left = (TimeRemainingColumn(), TextColumn("left"))
    columns = (TextColumn("evaluating"), MofNCompleteColumn(" of "), BarColumn(), *left)
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bar:
        yield from bar.track(batches)


EXPORTED = "training.json"


def how_evaluated(path: Path) -> dict[str, Any]:
    """Data settings, window and text (its fingerprint) of the training of a run, a checkpoint or an export; empty if unknown.

    Checkpoints of older versions have no `text`, exports no `path`. Raises `CheckpointError` if a manifest is damaged.
    """
    from elman_core.training.run.folder import MANIFEST, read_manifest
    from elman_core.training.settings import from_dict

    runs = [folder for folder in (path, path.parent.parent) if (folder / MANIFEST).is_file()]
    checkpoints = sorted(path.glob("checkpoints/step-*/state/trainer.json"), reverse=True)
    tree: dict[str, Any] = {}
    if runs:
        tree = read_manifest(runs[0])
    else:
        for file in (*checkpoints, path / "state/trainer.json", path / EXPORTED):
            with contextlib.suppress(OSError, CheckpointError):  # what is damaged does not load either
                tree = tree or read_json(file)
    if not tree:
        return {}
    try:
        data, size = tree["settings"]["data"], tree["settings"]["train"]["chunk_size"]
        from_dict({"data": data, "train": {"chunk_size": size}})
        text = check_value("text", tree["protocol"]["data"] if runs else tree.get("text"), dict | None)
        held = 0.0 if data.get("heldout_file") else data["heldout"]
        return {**data, "heldout": held, "chunk_size": size, "text": text}
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"what {path} says of its training is damaged: it lacks {error}") from error
    except ConfigError as error:
        raise CheckpointError(f"what {path} says of its training is damaged: {error}") from error
