"""Write the tables of options into the pages of variants, as the code has them: `make docs`. A test compares.

A page asks for one by a line `<!-- options NAME -->` above a line `<!-- /options -->`; what is between them is replaced.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from pathlib import Path

from elman_core.registry import get_variant
from elman_core.registry.variant import range_text, type_name

ROOT = Path(__file__).parents[1]


def table(name: str) -> str:
    config = get_variant(name).config
    hints = typing.get_type_hints(config)
    rows = ["| option | default | values | meaning |", "|---|---|---|---|"]
    for f in dataclasses.fields(config):
        values = ", ".join(filter(None, (type_name(hints[f.name]), range_text(f.metadata))))
        rows.append(f"| `{f.name}` | `{f.default}` | {values} | {f.metadata.get('help', '')} |")
    return "\n".join(rows)


def render(page: str) -> str:
    """The text of `page` with its tables as they should be."""
    block = re.compile(r"(<!-- options (\w+) -->\n).*?(<!-- /options -->)", flags=re.DOTALL)
    return block.sub(lambda m: f"{m[1]}\n{table(m[2])}\n\n{m[3]}", page)


def pages() -> list[Path]:
    return [*sorted(ROOT.glob("plugins/*/README.md")), *sorted(ROOT.glob("docs/variants/*.md"))]


if __name__ == "__main__":
    for path in pages():
        path.write_text(render(path.read_text(encoding="utf-8")), encoding="utf-8")
