"""Tasks that show what a recurrence can track, count and recall, and to which length."""

from __future__ import annotations

import typer

from elman_core.extension import print, table

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
    """Show a task: its definition, chance, what a window of the last inputs can tell, and some sequences."""
    from elman_tasks.catalogue import find

    chosen = find(task)
    print(f"{chosen.name}: {chosen.definition}\n")
    options = [f"{k}={v}" for k, v in chosen.defaults.items()]
    facts = [
        ["tokens", str(chosen.vocabulary)],
        ["trained on", f"{_span(chosen.train)} inputs" + f", {chosen.examples:,} sequences" * bool(chosen.examples)],
        ["tested on", _lengths(chosen.tests)],
        ["answers", "at the last place" if chosen.labels == "last" else "wherever there is one"],
        ["options", ", ".join([*options, "train", "tests", "labels", "examples"])],
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


def _span(train: tuple[int, int]) -> str:
    return str(train[1]) if train[0] == train[1] else f"{train[0]}-{train[1]}"


def _lengths(tests: tuple[int, ...]) -> str:
    return ", ".join(map(str, tests)) if len(tests) <= 4 else f"{tests[0]}, {tests[1]}, …, {tests[-1]}"
