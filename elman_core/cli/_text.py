"""Tables and JSON for the terminal: plain columns that survive a pipe."""

from __future__ import annotations

import builtins
import json
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from elman_core.registry.errors import printable


def print(*values: object, **how: Any) -> None:
    """As the built-in function, but no name that it prints controls the terminal: see `printable`."""
    builtins.print(*(printable(str(value), "\n\t") for value in values), **how)


def table(rows: Sequence[Sequence[str]], header: Sequence[str] = (), indent: int = 2) -> str:
    """Rows in aligned columns; numbers align to the right.

    The last column wraps at the width of the terminal. A last cell with too little room there stands below its row.
    """
    cells = [[printable(cell) for cell in row] for row in ([header] if header else []) + list(rows)]
    if not cells:
        return ""
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]) - 1)]
    numeric = [all(row[i].lstrip("+-").replace(",", "")[:1].isdigit() for row in rows) for i in range(len(widths))]
    left = indent + sum(widths) + 2 * len(widths)
    terminal = shutil.get_terminal_size((120, 24)).columns
    lines = []
    for row in cells:
        start = ""
        for cell, width, is_numeric in zip(row, widths, numeric, strict=False):
            start += (cell.rjust(width) if is_numeric else cell.ljust(width)) + "  "
        longest = max((len(word) for word in row[-1].split()), default=0)
        below = len(row[-1]) > terminal - left < max(30, longest)
        hang = indent + 4 if below else left
        wrapped = textwrap.wrap(row[-1], max(terminal - hang, 1), break_long_words=False, break_on_hyphens=False)
        first = wrapped.pop(0) if wrapped and not below else ""
        lines.append((" " * indent + start + first).rstrip())
        lines += [" " * hang + more for more in wrapped]
    return "\n".join(lines)


def wrapped(text: str, width: int | None) -> str:
    """Broken between words into lines of at most `width` characters; the second and further lines are indented."""
    if width is None:
        return text
    return textwrap.fill(text, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def columns() -> int | None:
    """The width of the terminal; None in a pipe or a file."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def dump(value: Any) -> str:
    """JSON for `--json`, in ASCII, which every terminal and pipe takes; what is not JSON is written as text."""
    return json.dumps(value, indent=2, default=str)
