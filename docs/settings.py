"""Print docs/reference/settings.md: every setting, as the code has it. `make docs` rewrites the file; a test compares."""

from __future__ import annotations

import dataclasses
import json
import typing
from typing import Any

from elman_core.training.settings import TABLES

HEAD = """# Settings

Written by `make docs`. Each is a key of a TOML recipe's table, and `--set table.name=value` on the command line. What is
`none` or `auto` is decided when a run starts, and its manifest says how.
"""


def kind(expected: Any) -> str:
    """The type as a reader of TOML knows it."""
    if typing.get_origin(expected) is typing.Literal:
        return ", ".join(f"`{a}`" for a in typing.get_args(expected))
    names = {int: "integer", float: "number", bool: "true, false", str: "text", list: "list", dict: "table"}
    parts = typing.get_args(expected) or (expected,)
    return " or ".join(names[p] for p in parts if p is not type(None))


def shown(field: dataclasses.Field) -> str:
    """The default as TOML writes it."""
    value = field.default if field.default is not dataclasses.MISSING else field.default_factory()  # type: ignore[misc]
    return "none" if value is None else f"`{json.dumps(value)}`"


def render() -> str:
    """The page."""
    parts = [HEAD]
    for table, settings in TABLES.items():
        hints = typing.get_type_hints(settings)
        parts.append(f"## {table}\n\n| key | values | default | |\n|---|---|---|---|")
        parts += [
            f"| `{table}.{f.name}` | {kind(hints[f.name])} | {shown(f)} | {f.metadata['help']} |"
            for f in dataclasses.fields(settings)
        ]
        parts.append("")
    return "\n".join(parts)


if __name__ == "__main__":
    print(render(), end="")
