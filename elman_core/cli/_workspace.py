"""The packages of a repository like this one, and the requirements file that lists them (`make requirements`)."""

from __future__ import annotations

import sys
from pathlib import Path

HEAD = """\
# Every package of this repository, at the versions of constraints.txt. Written by `make requirements`.
-c constraints.txt
"""


def packages(root: Path) -> list[str]:
    """Folders that hold a pyproject.toml, relative to the root: the root itself first, then by name."""
    inside = [p.parent.relative_to(root).as_posix() for p in root.glob("*/pyproject.toml")]
    inside += [p.parent.relative_to(root).as_posix() for p in root.glob("plugins/*/pyproject.toml")]
    return [".", *sorted(inside)]


def requirements(root: Path) -> str:
    """The text of requirements.txt."""
    return HEAD + "".join("-e .\n" if p == "." else f"-e ./{p}\n" for p in packages(root))


def is_workspace(folder: Path) -> bool:
    """Whether `folder` is a repository of packages with a requirements file of ours."""
    file = folder / "requirements.txt"
    return file.is_file() and file.read_text(encoding="utf-8").startswith(HEAD)


def write_requirements(root: Path) -> None:
    (root / "requirements.txt").write_text(requirements(root), encoding="utf-8")


if __name__ == "__main__":
    write_requirements(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
