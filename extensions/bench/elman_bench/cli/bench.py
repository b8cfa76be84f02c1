"""`elman bench`: several models by one protocol, one on each GPU."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from elman_core.extension import dump, print, table

from ._schedule import Again, Avoid, Gpus, On, Results, Seconds, Slots, Timeout, exit_code, places, run_suite

if TYPE_CHECKING:
    from elman_bench.jobs.job import State
    from elman_bench.suite.plan import Overrides, Plan, Planned
    from elman_bench.suite.spec import Suite


def bench(
    suite: str | None = typer.Argument(
        None, help="A shipped suite or a TOML file; without it, list the shipped suites."
    ),
    models: str | None = typer.Option(None, help="Only these models, separated by commas; others join the suite."),
    gpus: Gpus = "auto",
    avoid: Avoid = "",
    seeds: int | None = typer.Option(None, min=1, help="Number of seeds per model."),
    out: Path | None = typer.Option(None, help="Folder; by default runs/SUITE. An existing folder is resumed."),
    data: Path | None = typer.Option(None, help="The text; by default the source of Python's standard library."),
    steps: int | None = typer.Option(None, min=1, help="Optimizer steps per run."),
    tokens: int | None = typer.Option(None, min=1, help="Bytes per run, instead of steps."),
    minutes: float | None = typer.Option(None, help="Minutes per run, instead of steps."),
    tuning: int | None = typer.Option(None, min=1, help="Bytes per trial, in a suite with trials."),
    sets: list[str] = typer.Option([], "--set", metavar="KEY=VALUE", help="A setting; a list of values is tuned."),
    slots: Slots = None,
    timeout: Timeout = None,
    seconds: Seconds = None,
    results: Results = None,
    again: Again = False,
    strict: bool = typer.Option(False, "--strict", help="Fail if a model is not installed."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Show the runs and run nothing."),
    on: On = "local",
    json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Train the models of a suite, one on each GPU; write a report.

    The same command resumes interrupted runs; finished runs are never repeated.
    """
    from elman_bench.suite.plan import Overrides, split_names
    from elman_bench.suite.spec import find_suite, read_suite

    if suite is None:
        _list(json)
        return
    chosen = read_suite(find_suite(suite))
    folder = out or Path("runs") / chosen.name
    where = places(on, gpus, avoid, slots)
    names = split_names(chosen, models or "")
    planned = _plan(chosen, Overrides(_text(data), names, seeds, steps, tokens, minutes, tuple(sets), tuning, strict))
    if dry_run:
        _show(chosen, planned, folder, where.words, again, json)
        return
    told = sys.stderr if json else None
    for skipped in planned.skipped:
        print(f"left out: {skipped.model}: {skipped.reason}", file=told)
    print(f"{chosen.name}: {len(planned.jobs)} runs in {folder}, {where.words}", file=told, flush=True)
    states, signum = run_suite(chosen, planned, folder, where, timeout, seconds, results, again, errors=json)
    _end(folder, states, planned, json)
    raise typer.Exit(exit_code(states, signum))


def _text(data: Path | None) -> str:
    """The full path of the text."""
    from elman_bench.corpus import standard_library_corpus
    from elman_core.extension import require_text

    require_text(data)
    return str((data if data is not None else standard_library_corpus()).expanduser().resolve())


def _plan(suite: Suite, overrides: Overrides) -> Plan:
    from elman_bench.suite.plan import plan
    from elman_core.extension import open_text

    planned = plan(suite, overrides)
    open_text(planned.jobs[0].settings)  # all runs have the same text and batch shape
    return planned


def _end(path: Path, states: Sequence[State], planned: Plan, json: bool) -> None:
    """Write the report and print what to type next."""
    from ._board import summary

    report = None
    if any(state.ok for state in states):
        from elman_bench.results.report import write_report

        report = write_report(path)
    if json:
        pairs = zip(planned.jobs, states, strict=True)
        rows = [{**job.to_dict(), "status": s.status, "contended": s.contended} for job, s in pairs]
        print(dump({"folder": str(path), "report": report and str(report), "jobs": rows}))
        return
    print(summary(states))
    if any(not state.ok for state in states):
        failed = any(not state.ok and not state.unfinished for state in states)
        print("to resume, run the same command" + (", with --again to repeat failed runs" if failed else ""))
    if report is not None:
        print(f"report: {report}\nresults: elman results {path}")


def _show(suite: Suite, planned: Plan, path: Path, places: str, again: bool, json: bool) -> None:
    """Show the runs, and why the others would not run."""
    from elman_bench.jobs.job import read_state

    rows: list[dict[str, Any]] = []
    for job in planned.jobs:
        state = read_state(path / "jobs" / f"{job.id}.json", job.id)
        row = {**job.to_dict(), "tokens": job.tokens, "status": state.status, "then": _then(state, again)}
        row["trials_of"] = sorted({k for other in planned.jobs if other.id in job.trials for k in other.tuned})
        row["runs"] = state.unfinished or (again and not state.ok)
        rows.append(row)
    if json:
        skipped = [vars(s) for s in planned.skipped]
        print(dump({"suite": suite.name, "folder": str(path), "on": places, "jobs": rows, "skipped": skipped}))
        return
    print(f"{suite.name}: {suite.summary}\n{path}, {places}")
    cells = []
    for job, r in zip(planned.jobs, rows, strict=True):
        rate = "by trials" if "train.lr" in r["trials_of"] else f"{job.lr:g}"
        cells.append([r["id"], r["what"], f"{r['parameters']:,}", str(r["seed"]), rate, _length(job), r["then"]])
    print(table(cells, ("run", "model", "parameters", "seed", "lr", "tokens", "")))
    print(_total([job for job, r in zip(planned.jobs, rows, strict=True) if r["runs"]]))
    if planned.skipped:
        print("left out")
        print(table([[skipped.model, skipped.reason] for skipped in planned.skipped]))


def _length(job: Planned) -> str:
    return f"{job.tokens:,}" if job.tokens is not None else f"{job.settings.train.minutes:g} min"


def _total(todo: Sequence[Planned]) -> str:
    """The number of runs, with their total time and tokens."""
    minutes = sum(job.settings.train.minutes or 0 for job in todo)
    tokens = sum(job.tokens or 0 for job in todo)
    parts = [f"{len(todo)} runs"]
    if minutes:
        parts.append(f"{minutes / 60:.1f} hours of training in all")
    if tokens:
        parts.append(f"{tokens:,} tokens")
    return ", ".join(parts)


def _then(state: State, again: bool) -> str:
    if state.ok:
        return "ok: not repeated"
    if state.status == "waiting":
        return "starts"
    if state.unfinished:
        return f"{state.status}: resumes"
    return f"{state.status}: starts again" if again else f"{state.status}: not repeated without --again"


def _list(json: bool) -> None:
    from elman_bench.suite.spec import read_suite, shipped

    suites = [read_suite(path) for path in shipped().values()]
    if json:
        print(dump([{"name": s.name, "summary": s.summary, "models": [e.label for e in s.models]} for s in suites]))
        return
    print(table([[s.name, s.summary] for s in suites]))
