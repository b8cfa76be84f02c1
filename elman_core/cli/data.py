"""`elman data`: look at a training text."""

from __future__ import annotations

from pathlib import Path

import typer

from ._text import print

group = typer.Typer(help="Look at a training text.", no_args_is_help=True)


@group.command()
def info(
    file: Path = typer.Argument(help="A file of raw bytes."),
    heldout: float = typer.Option(0.01, help="Fraction held out for evaluation."),
    chunk_size: int = typer.Option(512, min=1, help="Bytes in a training window."),
    json_: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Show size, fingerprint, first documents and held-out split of FILE. Reads at most 16 MiB and some samples."""
    import json

    from elman_core.data import SEPARATOR, ByteFile, TrainingWindows, heldout_offsets, split

    data = ByteFile(file)
    parts = split(data.size, heldout)
    TrainingWindows(data, parts, chunk_size, rows=1, seed=0)
    looked_at = data.read(0, 16 << 20)
    texts = looked_at != SEPARATOR
    facts: dict[str, object] = {
        "path": str(file),
        **data.fingerprint(),
        "training_bytes": parts.training_bytes,
        "heldout_bytes": parts.heldout_bytes,
        "heldout_share": round(parts.heldout_bytes / data.size, 4),
        "heldout_block": parts.block,
        "documents_in_first_16_MiB": int(texts[0]) + int((texts[1:] & ~texts[:-1]).sum()),
        "distinct_bytes_in_first_16_MiB": len(set(looked_at.tobytes())),
    }
    if len(parts.heldout_runs):
        offsets, scored = heldout_offsets(parts, chunk_size)
        facts |= {"evaluation_windows": len(offsets), "evaluation_window_bytes": scored}
    if json_:
        print(json.dumps(facts))
        return
    for name, value in facts.items():
        shown = f"{value:,}" if isinstance(value, int) else value
        print(f"{name.replace('_', ' '):32} {shown}")
