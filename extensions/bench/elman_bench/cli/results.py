"""Commands for finished runs: `elman results`, `elman compare`, `elman plot`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import typer

from elman_core.extension import columns, dump, print


def _readable(paths: list[Path]) -> list[Any]:
    """The runs below the paths; one line for each without a readable step, which comparisons and pictures leave out."""
    from elman_bench.results.runs import METRICS, find_runs

    runs = find_runs(paths)
    begun = [run for run in runs if run.manifest or (run.path / METRICS).is_file()]
    left_out = [run for run in begun if not (run.manifest and len(run.metrics))]
    if len(left_out) < len(runs):  # otherwise the command itself says that there is nothing
        for run in left_out:
            print(f"elman: {run.path} is left out: {run.fault or f'no step in {METRICS}'}", file=sys.stderr)
    return runs


def results(
    paths: list[Path] = typer.Argument(None, help="Runs, suites, or folders of them; by default runs/."),
    format_: str = typer.Option("terminal", "--format", help="terminal, markdown, csv or json."),
    sort: str = typer.Option("bpb", help="Sort by bpb, loss, last100, tok_s, memory, minutes, parameters or model."),
    by_model: bool = typer.Option(
        False, "--by-model", help="One row per model: mean ± standard deviation over its seeds."
    ),
    everything: bool = typer.Option(
        False, "--all", help="Show also the values of tuned settings that were not chosen."
    ),
    html: bool = typer.Option(False, "--html", help="Write report.html into the suite's folder and print its path."),
    json_: bool = typer.Option(False, "--json", help="The same as --format json."),
) -> None:
    """Show tables of runs. Held-out bits per byte, loss at equal tokens, speed, memory, status.

    Runs are grouped by protocol, and the settings that differ between groups are named. Unfinished runs are shown as they are.
    """
    from elman_bench.results.collect import collect
    from elman_bench.results.runs import find_runs
    from elman_bench.results.tables import render

    form = "json" if json_ else format_
    given = paths or [Path("runs")]
    if html:
        from elman_bench.results.report import write_report

        for path in given:
            print(write_report(path))
        return
    found = collect(find_runs(given), sort, by_model, everything)
    print(render(found, form, by_model, columns()).rstrip("\n"))


def compare(
    paths: list[Path] = typer.Argument(
        help="Runs (the first is compared with each other run), a suite, or a folder of runs."
    ),
    last: int | None = typer.Option(
        None, min=10, help="Number of steps to compare; by default the last quarter of the common steps."
    ),
    json_: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Compare runs step by step on the same batches. Differences with intervals, for each seed and over all seeds.

    In a suite or a folder, the best model of each protocol is compared with each other model; trials of tuned settings are left
    out. Differences are in bits per byte, first minus second: below zero, the first is better.
    """
    from elman_bench.results.compare import against_best, against_first, as_data, describe
    from elman_bench.results.runs import MANIFEST
    from elman_core.extension import ConfigError

    runs = _readable(paths)
    single = any((path / MANIFEST).is_file() for path in paths)
    found = against_first(runs, last) if single else against_best(runs, last)
    if not found:
        raise ConfigError("there is nothing to compare: fewer than two models of one protocol have ended well")
    if json_:
        print(dump([as_data(comparison) for comparison in found]))
        return
    print("in bits per byte, first minus second: below zero, the first is better\n")
    print("\n\n".join(describe(comparison, columns()) for comparison in found))


def plot(
    paths: list[Path] = typer.Argument(help="Runs, suites and folders to draw side by side."),
    out: Path | None = typer.Option(None, help="Folder for the pictures; by default plots/ in PATH."),
    x: str | None = typer.Option(None, "--x", help="Draw against tokens, steps or minutes."),
) -> None:
    """Draw pictures as PNG and SVG: losses, and speed against quality.

    A suite shows each model at its best learning rate, over its seeds; trials are left out.
    """
    from elman_bench.results.plots import plot as draw

    for path in draw(_readable(paths), out or (paths[0] if len(paths) == 1 else Path()) / "plots", x):
        print(path)
