"""Print docs/reference/commands.md: the help of every command, as it is. `make docs` rewrites the file; a test compares."""

from __future__ import annotations

import contextlib
import io
import os
from typing import Any

import typer

from elman_core.cli import Extension, build_app, main

HEAD = """# Commands

Written by `make docs` from the commands' own help. Settings beyond these flags are `--set table.name=value`.
"""


def help_of(*words: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as text:
        main([*words, "--help"])
    return "\n".join(line.rstrip() for line in text.getvalue().strip().splitlines())


def commands() -> dict[str, Any]:
    """Every command of the core and of the installed extensions, by name."""
    group: Any = typer.main.get_command(build_app())
    found = {name: group.get_command(None, name) for name in sorted(group.list_commands(None))}
    return {name: command.load() if isinstance(command, Extension) else command for name, command in found.items()}


def render() -> str:
    os.environ["COLUMNS"] = os.environ["TERMINAL_WIDTH"] = "100"
    parts = [HEAD]
    for name, command in commands().items():
        parts.append(f"## elman {name}\n\n```text\n{help_of(name)}\n```\n")
        for inner in sorted(command.list_commands(None)) if hasattr(command, "list_commands") else ():
            parts.append(f"### elman {name} {inner}\n\n```text\n{help_of(name, inner)}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    print(render(), end="")
