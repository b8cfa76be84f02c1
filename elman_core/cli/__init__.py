"""The command `elman`. Each module beside this one holds one group of commands; heavy imports are inside the commands.
Extensions add commands through entry points in the group `elman.commands`, which are imported when they are called.

Exit codes: 0 done · 1 input or output · 2 configuration · 3 out of memory · 4 diverged · 5 kernel · 6 timeout ·
70 a fault of elman itself · 130 interrupted · 143 terminated after saving.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import io
import logging
import os
import sys
import traceback
from collections.abc import Mapping
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

from elman_core import __version__
from elman_core.registry import ElmanError, extensions
from elman_core.registry.checks import one_line, ran_out
from elman_core.registry.errors import did_you_mean, printable

# The commands of each module; `_` ends what would hide a word of Python.
COMMANDS: dict[str, tuple[str, ...]] = {
    "inspect": ("list_", "show"), "train": ("train", "resume"), "evaluate": ("eval_",),
    "generate": ("generate",), "export": ("export",),
}  # fmt: skip

# The sections of the help; commands that none names come last.
SECTIONS = {
    "Look": "list show size doctor", "Train": "data train resume eval demo", "Use a model": "generate export",
    "Write a variant": "new check build verify",
}  # fmt: skip

LONGEST = 2000
"""Characters of an error."""

# The base of all usage errors: click's, or that of the copy of click that newer versions of typer carry.
_UsageError: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


class _Group(TyperGroup):
    """A group of commands. sections: titles of its help with names below them. rest: the title of all others."""

    sections: ClassVar[Mapping[str, str]] = {}
    rest = "Commands"

    def invoke(self, ctx: Any) -> Any:
        """As the base class, but an interrupt stays an interrupt: newer versions of typer exit without a message."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise typer.Abort from error

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """As the base class, but a name is compared with all that `list_commands` has, also those of extensions."""
        try:
            return super().resolve_command(ctx, args)
        except _UsageError as error:
            error.message = f"No such command {args[0]!r}.{did_you_mean(args[0], self.list_commands(ctx))}"
            raise

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The commands by section, each with the first sentence of its help."""
        sections = {title: names.split() for title, names in self.sections.items()}
        named = [name for names in sections.values() for name in names]
        there = self.list_commands(ctx)
        sections[self.rest] = [n for n in there if n not in named]
        width = max(map(len, there))
        for title, names in sections.items():
            shown: list[Any] = [(n.ljust(width), self.get_command(ctx, n)) for n in names if n in there]
            rows = [(name, command.get_short_help_str(formatter.width)) for name, command in shown]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


class _Commands(_Group):
    """The commands of the core, and behind them those of extensions."""

    sections, rest = SECTIONS, "Extensions"

    @functools.cached_property
    def extensions(self) -> dict[str, Any]:
        return extensions.extensions("commands")

    def list_commands(self, ctx: Any) -> list[str]:
        own = super().list_commands(ctx)
        return [*own, *(name for name in self.extensions if name not in own)]

    def get_command(self, ctx: Any, name: str) -> Any:
        if (own := super().get_command(ctx, name)) is not None:
            return own
        points = self.extensions.get(name, [])
        return Extension(name, points) if points or name in extensions.known("commands") else None


class Extension(TyperCommand):
    """A command of an extension. Its help is read from the source; the extension is imported when the command is called."""

    def __init__(self, name: str, points: list[Any]) -> None:
        super().__init__(name)
        self.points = points

    def get_short_help_str(self, limit: int = 45) -> str:
        self.help = extensions.summary(self.points[0])
        return super().get_short_help_str(limit)

    def load(self) -> Any:
        """The command itself. Raises as `load_extension`."""
        assert self.name is not None
        app = _new_app()
        _add(app, extensions.load_extension("commands", self.name), self.name)
        return typer.main.get_command(app).commands[self.name]  # type: ignore[attr-defined]

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return self.load().make_context(info_name, args, parent, **extra)


def build_app() -> typer.Typer:
    app = _new_app()
    for module, names in COMMANDS.items():
        for name in names:
            _add(app, getattr(importlib.import_module(f"{__name__}.{module}"), name), name.rstrip("_"))
    return app


def _new_app() -> typer.Typer:
    app = typer.Typer(
        name="elman",
        cls=_Commands,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_start)
    return app


def _add(app: typer.Typer, made: Any, name: str) -> None:
    if isinstance(made, typer.Typer):
        app.add_typer(made, name=name, cls=_Group)
    else:
        app.command(name)(made)


def _start(
    version: bool = typer.Option(
        False, "--version", is_eager=True, callback=lambda asked: _say_version(asked), help="Show the version and exit."
    ),
) -> None:
    """Recurrent language models as plugins: look, train, compare, generate."""


def _say_version(asked: bool) -> None:
    if asked:
        print(f"elman {__version__}")
        raise typer.Exit


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code (the console script passes it to `sys.exit`)."""
    _ready_to_print()
    atexit.register(gc.freeze)  # the interpreter's last collections would walk every object of every import
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(_OneLine())
    try:
        code = build_app()(args=argv, standalone_mode=False, prog_name="elman")
        sys.stdout.flush()  # now, so that a closed pipe or a full disk is noticed here
        return code if isinstance(code, int) else 0
    except typer.Exit as leave:
        return leave.exit_code
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # without arguments the whole help is shown
            print(error.format_message(), file=sys.stderr)
        else:
            where = error.ctx.command_path if getattr(error, "ctx", None) else "elman"
            _say(f"{error.format_message().rstrip('.')} (`{where} --help`)")
        return 2
    except (KeyboardInterrupt, typer.Abort):
        _say("interrupted")
        return 130
    except BaseException as error:
        if isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError):  # typer exits then
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has gone: print nothing more
            return 0
        if isinstance(error, SystemExit) and not error.code:  # typer, after --install-completion
            return 0
        foreseen = _foreseen(error)
        if foreseen is None:
            return _unexpected(error)
        code, said = foreseen
        rank = os.environ.get("RANK", "0")
        is_printed = getattr(error, "said", False)  # by another process
        if rank != "0" and getattr(error, "everywhere", False):
            is_printed = True  # an error of all processes is printed by the first
        if not is_printed:
            _say(said if rank == "0" or said.startswith("rank ") else f"rank {rank}: {said}")
        if getattr(error, "fatal", False):
            sys.stdout.flush()
            os._exit(code)
        return code


def _ready_to_print() -> None:
    """Replace streams that the shell has closed (>&-, <&-); escape characters that the terminal's encoding lacks."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (until the process ends)
        elif mode == "w" and isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="backslashreplace")


class _OneLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), "" if record.name == "elman_core" else "\n\t")


def _unexpected(error: BaseException) -> int:
    """Say in one line what no command foresees, and whose fault it is; returns the exit code."""
    if os.environ.get("ELMAN_TRACEBACK", "0") not in ("", "0"):
        raise error
    trace = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [str(frame.f_globals.get("__name__")).partition(".")[0] for frame in trace]
    owners = {module: dist.name for module, dist in extensions.packages().items()}
    whose = next((f"plugin {owners[name]}" for name in reversed(names) if name in owners), "")
    last = max((i for i, name in enumerate(names) if name == "elman_core" or name in owners), default=-1)
    where = f" in {trace[last].f_code.co_filename}, {trace[last].f_code.co_name}" if trace else ""
    _say(f"{whose or 'elman itself'} failed: {one_line(error)}{where}; ELMAN_TRACEBACK=1 shows the traceback")
    return 2 if whose else 70


def _foreseen(error: BaseException) -> tuple[int, str] | None:
    """The exit code and the message of an error that commands may raise; None for any other."""
    if isinstance(error, ElmanError):
        return error.exit_code, str(error)
    if ran_out(error):
        first = (str(error).splitlines() or ["no more"])[0]
        return 3, f"out of memory: {first}; take a smaller model or fewer rows"
    if isinstance(error, OSError):
        named = error.strerror and error.filename is not None
        return 1, f"{error.filename}: {error.strerror}" if named else str(error)
    return None


def _say(message: str) -> None:
    shown = printable(message)
    print(f"elman: {shown if len(shown) <= LONGEST else shown[:LONGEST] + ' …'}", file=sys.stderr)
