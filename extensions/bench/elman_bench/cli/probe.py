"""`elman probe`: memory and speed of a training on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from elman_core.extension import dump, print, table

if TYPE_CHECKING:
    from elman_bench.measure import Measurement, Probe
    from elman_bench.probe import Largest
    from elman_core.extension import Settings


def probe(
    what: str = typer.Argument(metavar="RECIPE|VARIANT", help="A TOML recipe, or NAME[:preset][@WIDTHxDEPTH]."),
    dim: int | None = typer.Option(None, min=1, help="Width."),
    depth: int | None = typer.Option(None, min=1, help="Layers."),
    batch: int | None = typer.Option(None, min=1, help="Rows per step: train.batch_size."),
    chunk: int | None = typer.Option(None, min=1, help="Bytes per row: train.chunk_size."),
    data: Path | None = typer.Option(None, help="The training text; the standard library's source by default."),
    sets: list[str] = typer.Option([], "--set", metavar="KEY=VALUE", help="Any setting, such as train.accumulate=2."),
    search: bool = typer.Option(True, "--largest/--no-largest", help="Find the largest batch that fits a GPU."),
    seconds: float = typer.Option(
        3.0, min=0.1, help="Seconds for the timed steps: at least three, or one if steps on a CPU are slow."
    ),
    json_: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Measure memory and tok/s of a few real training steps. On a GPU, find the largest batch that fits. Keeps nothing.

    Each measurement runs in its own process. The largest batch is found to within 3 %, without accumulation.
    """
    import sys

    from elman_bench.corpus import standard_library_corpus
    from elman_core.extension import open_text, read_settings

    flags = {
        "model.hidden_size": dim, "model.num_hidden_layers": depth, "train.batch_size": batch, "train.chunk_size": chunk,
    }  # fmt: skip
    given = [f"{key}={value}" for key, value in flags.items() if value is not None]
    settings = read_settings(what, data, sets=[*given, *sets])
    if not settings.data.path:
        settings = read_settings(what, standard_library_corpus(), sets=[*given, *sets])
    open_text(settings)

    from elman_bench.probe import largest
    from elman_bench.probe import probe as measure

    rows, length = settings.train.batch_size, settings.train.chunk_size
    steps = f"a few training steps of {_name(settings)}, each {rows} rows of {length} bytes"
    print(f"{steps}: minutes for a large model on a CPU; --batch 1 is quicker", file=sys.stderr)
    found = measure(settings, seconds)
    best = None
    if search and found.device.startswith("cuda"):
        best = largest(settings, found, seconds, say=lambda line: print(line, file=sys.stderr))
    if json_:
        print(dump(_facts(settings, found, best)))
        return
    _show(settings, found, best)


def _facts(settings: Settings, found: Probe, best: Largest | None) -> dict[str, Any]:
    facts = {
        "model": _name(settings), "parameters": found.parameters, "device": found.device, "precision": found.precision,
        "backends": found.backends, "measurement": vars(found.measurement), "largest": None, "settings": settings.to_dict(),
    }  # fmt: skip
    if best is not None:
        facts["largest"] = {
            "batch_size": best.rows, "limited_by": best.limited_by, "measurement": vars(best.probe.measurement),
            "tried": {str(rows): outcome for rows, outcome in sorted(best.tried.items())},
        }  # fmt: skip
    return facts


def _show(settings: Settings, found: Probe, best: Largest | None) -> None:
    print(f"{_name(settings)}, {found.parameters:,} parameters on {found.device}, {found.precision}")
    print(f"  {'; '.join(found.backends)}")
    measured = [found.measurement, *([best.probe.measurement] if best is not None else [])]
    header = ("batch", "chunk", "tok/s", "ms a step", "first step", "memory", "")
    print(table([_row(m) for m in measured], header))
    if best is not None:
        print(f"largest batch: {best.rows} rows of {settings.train.chunk_size}; limited by: {best.limited_by}")


def _row(m: Measurement) -> list[str]:
    split = "" if m.accumulate == 1 else f"in {m.accumulate} micro-batches"
    return [
        str(m.batch_size), str(m.chunk_size), f"{m.tok_s:,.0f}", f"{1000 * m.step_seconds:.1f}",
        f"{m.first_step_seconds:.1f} s", f"{m.peak_memory / 2**30:.2f} GiB", split,
    ]  # fmt: skip


def _name(settings: Settings) -> str:
    model = settings.model
    name = model.variant if isinstance(model.variant, str) else "+".join(map(str, model.variant))
    return f"{name}@{model.hidden_size}x{model.num_hidden_layers}"
