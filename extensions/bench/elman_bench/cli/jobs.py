"""Run any commands, one on each free GPU; show and cancel them."""

from __future__ import annotations

import datetime
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand

from elman_core.extension import dump, print, table

from ._schedule import Again, Avoid, Gpus, On, Slots, Timeout, carry_out, exit_code, free_folder, places

if TYPE_CHECKING:
    from elman_bench.jobs.job import Attempt, Job, State

_AFTER = "elman.after"


class _Run(TyperCommand):
    """Keeps the words after `--`, which click would mix with the arguments before it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            ctx.meta[_AFTER] = args[args.index("--") + 1 :]
            args = args[: args.index("--")]
        return super().parse_args(ctx, args)


group = typer.Typer(no_args_is_help=True, help=__doc__)


@group.command(cls=_Run)
def run(
    ctx: typer.Context,
    file: Path | None = typer.Argument(
        None, metavar="FILE | -- COMMAND", help="One shell command per line; # starts a comment."
    ),
    gpus: Gpus = "auto",
    avoid: Avoid = "",
    each: int = typer.Option(1, min=1, help="GPUs per job."),
    out: Path | None = typer.Option(None, help="Folder; by default runs/FILE. An existing folder is resumed."),
    slots: Slots = None,
    timeout: Timeout = None,
    again: Again = False,
    on: On = "local",
    json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Run each command once, one on each free GPU (or share of the CPU).

    Each command sees only its GPU (CUDA_VISIBLE_DEVICES). Its output goes to logs/ in the folder.
    """
    from elman_bench.suite.folder import Folder

    commands, name = _commands(file, ctx.meta.get(_AFTER))
    path = out or name
    where = places(on, gpus, avoid, slots)
    folder = Folder(path)
    try:
        jobs = folder.commands(commands, None if timeout is None else 60 * timeout, each)
        told = sys.stderr if json else None
        print(f"{len(jobs)} job{'s' if len(jobs) > 1 else ''} in {path}, {where.words}", file=told, flush=True)
        states, signum = carry_out(jobs, where.executor, {}, again, errors=json)
    finally:
        folder.close()
    if json:
        print(dump({"folder": str(path), "jobs": [_facts(job, s) for job, s in zip(jobs, states, strict=True)]}))
    else:
        from ._board import summary

        print(f"{summary(states)}; logs: {path / 'logs'}")
    raise typer.Exit(exit_code(states, signum))


@group.command()
def status(
    folder: Path | None = typer.Argument(
        None, help="Folder of a suite or of commands; without it, show this machine's GPUs."
    ),
    json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Show the jobs of a folder; or which GPUs are free, and who uses the others."""
    if folder is None:
        _gpus(json)
        return
    from elman_bench.jobs.job import read_state
    from elman_bench.suite.folder import is_held, known_jobs

    jobs = known_jobs(folder)
    states = [read_state(job.state, job.id) for job in jobs]
    held = is_held(folder)
    if not held:
        for job, state in zip(jobs, states, strict=True):
            _look(job, state)
    if json:
        listed = [_facts(job, state) for job, state in zip(jobs, states, strict=True)]
        print(dump({"folder": str(folder), "scheduler": held, "jobs": listed}))
        return
    from ._board import Board, summary

    board = Board(jobs, {})
    rows = [
        [s.id, s.status + (" contended" if s.contended else ""), _where(s), _why(s) or board.far(s)] for s in states
    ]
    print(table(rows, ("job", "status", "where", "")))
    working = "a scheduler is running" if held else "no scheduler is running"
    print(f"{summary(states)}; {working}")


@group.command()
def cancel(
    folder: Path = typer.Argument(help="Folder of a suite or of commands."),
    ids: list[str] | None = typer.Argument(None, metavar="JOB", help="Jobs to stop; by default all unfinished jobs."),
) -> None:
    """Stop jobs; running trainings save first. Start the same suite again to resume them."""
    from elman_bench.jobs.job import read_state
    from elman_bench.jobs.local import stop_orphan
    from elman_bench.jobs.scheduler import cancel_file
    from elman_bench.suite.folder import is_held, known_jobs
    from elman_core.extension import ConfigError, did_you_mean, storage_errors

    jobs = {job.id: job for job in known_jobs(folder)}
    for id in ids or ():
        if id not in jobs:
            raise ConfigError(f"{folder} has no job {id!r}.{did_you_mean(id, jobs)}")
    held = is_held(folder)
    asked = 0
    for job in (jobs[id] for id in ids or jobs):
        state = read_state(job.state, job.id)
        if held and state.unfinished:
            with storage_errors(f"cannot ask the scheduler of {folder} to stop {job.id}"):
                cancel_file(job).parent.mkdir(parents=True, exist_ok=True)
                cancel_file(job).touch()
            asked += 1
        elif not held and state.status == "running":
            asked += stop_orphan(job, state.attempts[-1], len(state.attempts))
    told = "the scheduler stops" if held else "told to stop:"
    print(f"{told} {asked} job{'' if asked == 1 else 's'} of {folder}; running trainings save first")


def _commands(file: Path | None, after: list[str] | None) -> tuple[dict[str, list[str]], Path]:
    """Commands by name, and their default folder. Raises `ConfigError` without exactly one file or command."""
    from elman_core.extension import ConfigError

    if (file is None) == (not after):
        raise ConfigError("give a file with one command per line, or one command: elman jobs run -- COMMAND")
    if file is None:
        assert after
        return {"1": after}, free_folder("jobs-" + datetime.datetime.now().strftime("%Y%m%d-%H%M%S"))
    try:  # a shell, too, ends a command at a newline, and at no other character that separates lines
        lines = [line.strip(" \t\r") for line in file.read_bytes().decode("utf-8-sig").split("\n")]
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8, from byte {error.start:,} on: save it as UTF-8") from error
    wanted = [line for line in lines if line and not line.startswith("#")]
    if not wanted:
        raise ConfigError(f"{file} has no commands")
    return {str(i): ["sh", "-c", line] for i, line in enumerate(wanted, 1)}, Path("runs") / file.stem


def _gpus(json: bool) -> None:
    from elman_bench.jobs.gpus import monitor
    from elman_bench.jobs.slots import cores, survey

    driver = monitor()
    rows = survey(driver.gpus(), driver)
    if json:
        print(dump(rows))
    elif rows:
        print(table([[r["gpu"], r["name"], r["state"]] for r in rows], ("gpu", "", "")))
    else:
        print(f"no GPU; {cores()} cores")


def _facts(job: Job, state: State) -> dict[str, Any]:
    import dataclasses

    return {**dataclasses.asdict(state), "command": list(job.command), "run": job.run and str(job.run)}


def _look(job: Job, state: State) -> None:
    """Update the state of a job whose scheduler is gone: its file says "running" until the next scheduler starts."""
    from elman_bench.jobs.local import orphan_ending
    from elman_bench.jobs.outcome import final_status

    if state.status != "running":
        return
    last = state.attempts[-1]
    if ending := orphan_ending(job, last, len(state.attempts)):
        last.exit_code, state.status = ending.exit_code, final_status(job, ending, "", last.started)


def _where(state: State) -> str:
    last = _last(state)
    if last is None:
        return ""
    names_its_machine = last.slot.endswith(f" of {last.host}")  # on a cluster
    return last.slot if names_its_machine else f"{last.slot} on {last.host}"


def _why(state: State) -> str:
    """Why a job did not end well, and where its log is."""
    from elman_bench.jobs.outcome import last_word

    last = _last(state)
    if last is None or state.ok or state.status == "running":
        return ""
    return "; ".join(filter(None, (last.cause, last_word(last), f"see {last.log}" if last.log else "")))


def _last(state: State) -> Attempt | None:
    return state.attempts[-1] if state.attempts else None
