"""Find what a recurrence can track, count and recall."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from elman_bench.cli._schedule import Again, Avoid, Gpus, Results, Seconds, Slots, Timeout, exit_code, places, run_suite

from elman_core.extension import print, table

if TYPE_CHECKING:
    from elman_bench.results.report import Extra

group = typer.Typer(no_args_is_help=True, help=__doc__)


@group.command("list")
def list_() -> None:
    """List the tasks."""
    from elman_tasks.catalogue import TASKS

    rows = []
    for name, task in TASKS.items():
        rows.append([name, str(task.vocabulary), _span(task.train), _lengths(task.tests), task.definition])
    print(table(rows, ("task", "tokens", "trained on", "tested on", "")))


@group.command()
def show(
    task: str = typer.Argument(help="A task, with options if any: mqar:pairs=8,train=128-128."),
    rows: int = typer.Option(2, min=0, help="Sequences to show."),
) -> None:
    """Show a task. Its definition, chance, what a window of the last inputs can tell, and some sequences."""
    from elman_tasks.catalogue import find

    chosen = find(task)
    print(f"{chosen.name}: {chosen.definition}\n")
    options = [f"{k}={v}" for k, v in chosen.defaults.items()]
    facts = [
        ["tokens", str(chosen.vocabulary)],
        ["trained on", f"{_span(chosen.train)} inputs" + f", {chosen.examples:,} sequences" * bool(chosen.examples)],
        ["tested on", _lengths(chosen.tests)],
        ["answers", "at the last place" if chosen.labels == "last" else "wherever there is one"],
        ["options", ", ".join([*options, "train", "tests", "labels", "examples", "until"])],
    ]
    chance, *windows = chosen.windows().items()
    facts.append(["chance", f"{chance[1]:.3f}"])
    facts.append(["windows", ", ".join(f"last {w} inputs {share:.3f}" for w, share in windows)])
    print(table(facts))
    drawn = chosen.test(chosen.train[1], rows)
    for tokens, targets, scored in zip(drawn.tokens[:, :64], drawn.targets, drawn.scored, strict=True):
        print("\ninputs   " + " ".join(chosen.names(tokens)))
        answers = [name if asked else "." for name, asked in zip(chosen.names(targets[:64]), scored[:64], strict=True)]
        print("answers  " + " ".join(answers))


@group.command()
def train(
    task: str = typer.Argument(help="A task, with options if any."),
    model: str = typer.Argument(metavar="RECIPE|VARIANT", help="A TOML recipe, or NAME[:preset][@WIDTHxDEPTH]."),
    out: Path | None = typer.Option(None, help="Folder of the run; a new one under runs/ by default."),
    steps: int | None = typer.Option(None, help="Optimizer steps."),
    sets: list[str] = typer.Option([], "--set", metavar="KEY=VALUE", help="Any setting, such as train.lr=1e-3."),
) -> None:
    """Train a model on a task. The accuracy by length is in accuracy.jsonl of the run; `elman resume RUN` continues it.

    The same as elman train with --data task:TASK, chunks of the task's length and the logger accuracy.
    """
    from elman_core.extension import read_settings, start
    from elman_tasks.catalogue import find
    from elman_tasks.score import read

    chosen = find(task)
    own = [f"data.path={json.dumps(f'task:{task}')}", f"train.chunk_size={chosen.longest}", "train.loggers=accuracy"]
    run = start(read_settings(model, steps=steps, sets=[*own, *sets]), out)
    result = run.fit()
    for line in read(run.path)[-1:]:
        rows = [[length, f"{test['places']:.3f}", f"{test['whole']:.3f}"] for length, test in line["tests"].items()]
        print(table(rows, ("length", "answers right", "sequences with all right")))
        print(f"chance {chosen.windows(())[0]:.3f}")
    if result.signal:
        raise typer.Exit(128 + result.signal)


@group.command()
def suite(
    name: str | None = typer.Argument(
        None, help="A shipped suite or a TOML file; without it, list the shipped suites."
    ),
    models: str | None = typer.Option(None, help="Only these models, separated by commas; others join the suite."),
    tasks: str | None = typer.Option(None, help="Only these tasks, separated by spaces; others join the suite."),
    seeds: int | None = typer.Option(None, min=1, help="Number of seeds per model."),
    steps: int | None = typer.Option(None, min=1, help="Optimizer steps per run."),
    sets: list[str] = typer.Option([], "--set", metavar="KEY=VALUE", help="A setting; a list of values is tuned."),
    out: Path | None = typer.Option(None, help="Folder; by default runs/tasks-SUITE. An existing folder is resumed."),
    gpus: Gpus = "auto",
    avoid: Avoid = "",
    share: int = typer.Option(1, min=1, help="Runs on each GPU at once; above 1 their speeds are marked as contended."),
    slots: Slots = None,
    timeout: Timeout = None,
    seconds: Seconds = None,
    results: Results = None,
    again: Again = False,
    dry_run: bool = typer.Option(False, "--dry-run", help="Show the runs and run nothing."),
) -> None:
    """Train the models of a suite on its tasks; write tables, pictures and a report.

    The same command resumes interrupted runs; finished runs are never repeated.
    """
    from elman_bench.suite.plan import Overrides, split_names

    from elman_tasks import suite as suites

    if name is None:
        print(table([[known, suites.read_suite(known)[0].summary] for known in suites.shipped()]))
        return
    chosen, listed, tree = suites.read_suite(name)
    folder, where = out or Path("runs") / chosen.name, places("local", gpus, avoid, slots, share)
    names = split_names(chosen, models or "")
    listed = [task for only in tasks.split() for task in suites.named(only, listed)] if tasks else listed
    changes = Overrides("", names, seeds, steps, sets=tuple(sets))
    planned = suites.plan_tasks(chosen, listed, tree, changes)
    for left_out in planned.skipped:
        print(f"left out: {left_out.model}: {left_out.reason}")
    print(f"{chosen.name}: {len(planned.jobs)} runs in {folder}, {where.words}", flush=True)
    if dry_run:
        rows = [[job.id, job.what, str(job.settings.train.steps)] for job in planned.jobs]
        print(table(rows, ("run", "model", "steps")))
        return
    states, signum = run_suite(chosen, planned, folder, where, timeout, seconds, results, again)
    if (ended := suites.finish(folder)) is not None:
        _print(ended[0])
        print(f"report: {ended[1]}\nfigures: {folder / suites.RESULT}")
    if any(not state.ok for state in states):
        print("to resume, run the same command")
    raise typer.Exit(exit_code(states, signum))


def _print(sections: list[Extra]) -> None:
    for section in sections:
        print(f"\n{section.title}: {section.summary}\n{table(section.rows, section.heads)}")


def _span(train: tuple[int, int]) -> str:
    return str(train[1]) if train[0] == train[1] else f"{train[0]}-{train[1]}"


def _lengths(tests: tuple[int, ...]) -> str:
    return ", ".join(map(str, tests)) if len(tests) <= 4 else f"{tests[0]}, {tests[1]}, …, {tests[-1]}"
