"""How packages of this project are installed. Until a release is on the package index, a stranger could take their names there;
so the commands that the project prints install from a checkout."""

from __future__ import annotations

import functools
import re
import shlex
import tomllib
from pathlib import Path

SOURCE = ""
"""Where they come from: "" for a checkout, "git+https://…" for the repository, "index" for the package index."""

KINDS = ("commands", "executors", "loggers", "programs", "sources")
KNOWN = Path(__file__).parent / "extensions.toml"
FOLDERS = {"core": ".", "csrc": "./csrc_common", "baselines": "./baselines"}
SHIPPED = "-r requirements.txt"
"""Installs elman-checkpoints in a checkout, with the plugins that it needs."""


def pip_install(*requirements: str) -> str:
    """The command that installs packages, in a checkout if they are ours: "pip install ./plugins/e99"."""
    return " ".join(("pip install", *dict.fromkeys(map(_target, requirements))))


def how_to_install(*requirements: str, mark: str = "") -> str:
    """As `pip_install`, for a message: with the place in which the command works, behind `mark`, such as a shell's "# "."""
    somewhere = not SOURCE and any(_target(r) not in (r, shlex.quote(r)) for r in requirements)
    return pip_install(*requirements) + f" {mark}in a checkout of elman" * somewhere


@functools.cache
def known(kind: str) -> dict[str, str]:
    """The distributions of well-known extensions of one of the `KINDS`, by name."""
    return tomllib.loads(KNOWN.read_text(encoding="utf-8")).get(kind, {})


def moved(name: str, point: str, now: str, kind: str = "commands") -> str:
    """What is said of a name that is in the package of a command, or of another kind of entry point, now."""
    package = known(kind)[point]
    return (
        f"{name} is {package.replace('-', '_')}.{now} now: import that; where it is missing: {how_to_install(package)}"
    )


def _target(requirement: str) -> str:
    """What pip is given for a requirement."""
    ours = re.fullmatch(r"elman-([\w-]+)(\[[\w,]+\])?.*", requirement)
    if SOURCE == "index" or ours is None:
        return shlex.quote(requirement)
    name, extra = ours.groups("")
    if name == "checkpoints":
        return SHIPPED
    kind = "extensions" if any(f"elman-{name}" in known(kind).values() for kind in KINDS) else "plugins"
    folder = FOLDERS.get(name, f"./{kind}/{name.replace('-', '_')}")
    inside = f"#subdirectory={folder[2:]}" if folder[2:] else ""
    return shlex.quote(f"elman-{name}{extra} @ {SOURCE}{inside}" if SOURCE else f"{folder}{extra}")
