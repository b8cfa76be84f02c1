"""The other packages that ours ask for, at the ends of what they admit: `python tests/bounds.py lowest` (or `newest`).

Prints requirements for pip. `lowest` names the least version that every package here admits; `newest` repeats the ranges,
without torch, whose newest release may bring libraries for a GPU.
"""

import sys
import tomllib
from collections import defaultdict
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]


def admitted() -> dict[str, SpecifierSet]:
    """For each package that is not ours: the versions that all of ours admit, to be built, used and tested."""
    found: dict[str, SpecifierSet] = defaultdict(SpecifierSet)
    for file in (f for where in ("", "*/", "plugins/*/", "extensions/*/") for f in ROOT.glob(f"{where}pyproject.toml")):
        settings = tomllib.loads(file.read_text(encoding="utf-8"))
        project, build = settings["project"], settings["build-system"]
        tests = project.get("optional-dependencies", {}).get("test", [])
        for line in (*project.get("dependencies", []), *tests, *build["requires"]):
            wanted = Requirement(line)
            if not wanted.name.startswith("elman-"):
                found[canonicalize_name(wanted.name)] &= wanted.specifier
    return found


def lowest(versions: SpecifierSet) -> Version:
    return max(Version(s.version) for s in versions if s.operator == ">=")


if __name__ == "__main__":
    for name, versions in sorted(admitted().items()):
        if sys.argv[1:] == ["lowest"]:
            print(f"{name}=={lowest(versions)}")
        elif name != "torch":
            print(f"{name}{versions}")
