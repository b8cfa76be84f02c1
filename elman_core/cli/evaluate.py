"""`elman eval`: bits per byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

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
    precision: str = typer.Option("fp32", help="fp32 or bf16."),
    device: str = typer.Option("auto", help="auto, cpu, cuda, cuda:1."),
    json_: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Measure the bits per byte of MODEL on held-out windows of a text, or on all of it.

    Each held-out window starts from the initial state, as in training. With --all, the file is cut into ROWS parts that are
    read side by side with a carried state: each byte but the first is predicted from all bytes before it in its part.
    """
    import json
    import math

    from elman_core.data import ByteFile, heldout_offsets, split
    from elman_core.registry import ConfigError, DataError, DivergedError

    asked = _of_run(Path(model))
    path = data or asked.get("path")
    if path is None:
        raise DataError(
            f"{model} is not a run, so its text is unknown: correct the path, or give a text with --data FILE"
        )
    if precision not in ("fp32", "bf16"):
        raise ConfigError(f"--precision takes fp32 or bf16, not {precision!r}")
    file = ByteFile(path)
    if data is None and file.fingerprint() != asked["text"]:
        raise DataError(f"{path} is no longer the text of this run; to score it anyway, use --data {path}")
    if not everything:  # what is wrong with these is said before torch is imported
        parts = split(file.size, heldout if heldout is not None else asked.get("heldout", 0.01))
        _, length = heldout_offsets(parts, window or 1)
        if window and length < window:
            raise ConfigError(f"--window {window}: held-out stretches have {length} bytes; give at most that, or --all")

    from elman_core.model.checkpoint import load_checkpoint
    from elman_core.training.evaluate import on_everything, on_windows
    from elman_core.training.precision import compute_in, pick_device

    chosen = pick_device(device)
    ladder: Any = load_checkpoint(model, device=chosen)
    length = window or asked.get("chunk_size") or ladder.config.max_position_embeddings
    with compute_in(precision, chosen):
        if everything:
            result = on_everything(ladder, file, length, rows, most)
        else:
            offsets, length = heldout_offsets(parts, length, most or asked.get("eval_bytes", 2**20))
            result = on_windows(ladder, file, offsets, length, rows)
    if not math.isfinite(result["loss"]):
        raise DivergedError(f"the loss of {model} is {result['loss']}: its weights or its activations are not finite")
    result |= {"part": "all" if everything else "held out", "window": length, "data": str(path), "model": model}
    if json_:
        print(json.dumps(result))
        return
    how = "all, the state carried" if everything else f"held out, windows of {length}"
    print(f"{result['bits_per_byte']:.4f} bits per byte  ({result['loss']:.4f} nats; {result['bytes']:,} bytes {how})")


def _of_run(path: Path) -> dict[str, Any]:
    """The data settings and the window of the run that `path` is, or whose checkpoint it is."""
    from elman_core.registry import CheckpointError
    from elman_core.training.run.folder import MANIFEST, read_manifest

    for folder in (path, path.parent.parent):
        if (folder / MANIFEST).is_file():
            try:
                manifest = read_manifest(folder)
                settings, text = manifest["settings"], manifest["protocol"]["data"]
                return {**settings["data"], "chunk_size": settings["train"]["chunk_size"], "text": text}
            except (KeyError, TypeError) as error:
                raise CheckpointError(f"{folder / MANIFEST} is damaged: it lacks {error}") from error
    return {}
