"""Write the tables of options into the pages of variants, and the commands that install our packages into all pages, as the
code has them: `make docs`. A test compares.

A page asks for one by a line `<!-- options NAME -->` above a line `<!-- /options -->`; what is between them is replaced.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import typing
from pathlib import Path

from elman_core.registry import get_variant, installing
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


OURS = re.compile(r"\./(?:plugins/|extensions/)?(\w+)((?:\[[\w,]+\])?)")
WORDS = r"(?:'?(?:\.|elman-)[\w./,\[\]-]*'?(?: (?=['\w.]))?|'lm-eval\[hf\]')+"
COMMAND = re.compile(rf"pip install ({WORDS}|{installing.SHIPPED}(?=\nelman generate pretrained))")
BASE = ("elman-core", "elman-csrc")  # what all others need: pip would look for it on the index


def _installed(command: re.Match) -> str:
    if command[1] == installing.SHIPPED:
        return installing.pip_install("elman-checkpoints")
    words = [OURS.sub(lambda m: f"elman-{m[1]}{m[2]}", word) for word in shlex.split(command[1])]
    words = [word for word in words if word not in (".", "elman-csrc_common", *BASE)]
    alone = (
        installing.SOURCE == "index" or not any(w.startswith("elman-") for w in words) or words == ["elman-checkpoints"]
    )
    return installing.pip_install(*BASE * (not alone), *words)


def render(page: str) -> str:
    """The text of `page` with its tables and its `pip install` as they should be."""
    page = COMMAND.sub(_installed, page)
    block = re.compile(r"(<!-- options (\w+) -->\n).*?(<!-- /options -->)", flags=re.DOTALL)
    return block.sub(lambda m: f"{m[1]}\n{table(m[2])}\n\n{m[3]}", page)


def pages() -> list[Path]:
    globs = (
        "[pec]*s/**/README.md",
        "baselines/README.md",
        *(f"docs/{folder}/*.md" for folder in ("variants", "how-to", "start")),
    )
    return sorted({path for glob in globs for path in ROOT.glob(glob)})


if __name__ == "__main__":
    for path in pages():
        path.write_text(render(path.read_text(encoding="utf-8")), encoding="utf-8")
