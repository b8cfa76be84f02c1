"""Look at training texts, and pack them."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from elman_core.extension import print

from .pack import pack

group = typer.Typer(help=__doc__, no_args_is_help=True)
group.command()(pack)


@group.command()
def info(
    file: Path = typer.Argument(help="A file of raw bytes, or a packed file."),
    heldout: float = typer.Option(0.01, help="Fraction held out for evaluation."),
    chunk_size: int = typer.Option(512, min=1, help="Bytes in a training window."),
    json_: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Show size, fingerprint, first documents and held-out split of FILE. Reads at most 16 MiB and some samples."""
    import numpy as np

    from elman_core.extension import PackedFile, TrainingWindows, heldout_offsets, open_file, split

    data = open_file(file)
    parts = split(data.size, heldout)
    TrainingWindows(data, parts, chunk_size, rows=1, seed=0)
    looked_at = data.windows(np.zeros(1, np.int64), min(data.size, 16 << 20))[0]
    texts = looked_at != (-1 if data.separator is None else data.separator)
    facts: dict[str, object] = {
        "path": str(file),
        **data.fingerprint(),
        f"training_{data.unit}": parts.training_bytes,
        f"heldout_{data.unit}": parts.heldout_bytes,
        "heldout_share": round(parts.heldout_bytes / data.size, 4),
        "heldout_block": parts.block,
        "documents_in_first_16_MiB": int(texts[0]) + int((texts[1:] & ~texts[:-1]).sum()),
        f"distinct_{data.unit}_in_first_16_MiB": len(np.unique(looked_at)),
    }
    if isinstance(data, PackedFile):
        names = ("tokens", "documents", "dtype", "vocab_size", "masked", "bytes")
        facts |= {name: data.manifest[name] for name in names}
    if len(parts.heldout_runs):
        offsets, scored = heldout_offsets(parts, chunk_size)
        facts |= {"evaluation_windows": len(offsets), f"evaluation_window_{data.unit}": scored}
    if json_:
        print(json.dumps(facts))
        return
    for name, value in facts.items():
        shown = f"{value:,}" if isinstance(value, int) else value
        print(f"{name.replace('_', ' '):32} {shown}")
