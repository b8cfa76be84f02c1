"""The files of `elman new`: the template, or the sources of an installed plugin under another name."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import keyword
import re
import shutil
from collections import Counter
from collections.abc import Iterable
from importlib import resources
from importlib.abc import Traversable
from pathlib import Path
from typing import Any

from elman_core import __version__
from elman_core.extension import ConfigError, plugins, storage_errors

# What a copied plugin must not claim for itself: names and figures that belong to the original; errors.json, too.
NOT_COPIED = ("aliases", "parse_alias", "published")


def class_name(name: str) -> str:
    """ "e99" is E99, "leaky_cell" is LeakyCell."""
    return "".join(part.capitalize() for part in name.split("_"))


# Words of C++ that are none of Python, and functions of the headers of cells.
OF_CPP = (
    " alignas alignof asm auto bool case catch char const constexpr decltype default delete do double enum explicit export "
    "extern float friend goto inline int long mutable namespace new noexcept nullptr operator private protected public "
    "register short signed sizeof static struct switch template this throw typedef typename union unsigned using virtual "
    "void volatile log_sigmoid number numbers self_gate self_gated silu softplus std "
)


def render(name: str, folder: Path, source: str | None = None, skeleton: str = "dense") -> tuple[Path, list[str]]:
    """Write a plugin; returns its folder and the files in it.

    Args:
        name: of the variant. source: an installed variant to copy; None for the template of a skeleton.
        folder: the plugin goes to `folder/NAME`, or to `folder/plugins/NAME` where `folder/plugins` holds packages already.

    Raises:
        ConfigError: a name that cannot be used or is taken, a folder that exists, a source that cannot be copied.
    """
    if not re.fullmatch(r"[a-z]([a-z0-9_]{0,58}[a-z0-9])?", name) or keyword.iskeyword(name):
        raise ConfigError(
            f"a variant's name is lower case letters, digits and _, such as e99, and no word of Python, not {name!r}"
        )
    if f" {name} " in OF_CPP:
        raise ConfigError(
            f"{name!r} has another meaning in C++, so no cell lies in a namespace of it: choose another name"
        )
    if (taken := plugins().installed.get(name)) is not None:
        raise ConfigError(f"variant {name!r} already exists, from {taken.requirement}: choose another name")
    if importlib.util.find_spec(f"elman_{name}") is not None:
        raise ConfigError(f"the package elman_{name} already exists: choose another name")
    target = (folder / "plugins" if any(folder.glob("plugins/*/pyproject.toml")) else folder) / name
    if target.exists():
        raise ConfigError(f"{target} exists: choose another name or --dir")
    templates = resources.files("elman_authors") / "template"
    files = _filled(templates / "all", name) | _filled(templates / skeleton, name)
    if source is not None:
        equation = plugins().get(source).variant.equation_of()
        readme = re.sub("`.*`(?=\\. Install)", lambda _: f"`{equation}`", files["README.md"])
        files = {"README.md": readme, "pyproject.toml": files["pyproject.toml"], **_copied(source, name)}
    with storage_errors(f"cannot write {target}"):
        try:
            for path, text in files.items():
                (target / path).parent.mkdir(parents=True, exist_ok=True)
                (target / path).write_text(text, encoding="utf-8")
        except OSError:
            shutil.rmtree(target, ignore_errors=True)
            raise
    return target, sorted(files)


def equations(target: Path, files: Iterable[str]) -> list[str]:
    """FILE:LINES of every place in words, comments and code that says what the variant computes, to be changed with it."""
    says = re.compile(
        r"_t\b.* = |=.*_t\b|\b[A-Za-z]' |summary=|equation=|update=|readout=|Maps\(|def step|(forward|backward|line)\("
    )
    found = []
    for path in files:
        lines = (target / path).read_text(encoding="utf-8").splitlines()
        whole = path.startswith("tests/") or path.endswith(("__init__.py", "reference.py"))
        places = [str(i) for i, line in enumerate(lines, 1) if says.search(line) or (whole and i == 1)]
        found += [f"{path}:{','.join(places)}"] if places else []
    return found


def _filled(template: Traversable, name: str) -> dict[str, str]:
    major, minor = __version__.split(".")[:2]
    words = {
        "name": name, "Name": class_name(name), "core": f"{major}.{minor}", "next": f"{major}.{int(minor) + 1}",
    }  # fmt: skip
    files = {}
    for path, text in _texts(template):
        for word, value in words.items():
            text = text.replace("{{" + word + "}}", value)
        files[path.replace("NAME", name).removesuffix(".in")] = text
    return files


def _texts(folder: Traversable, prefix: str = "") -> list[tuple[str, str]]:
    found = []
    for entry in sorted(folder.iterdir(), key=lambda e: e.name):
        if entry.is_dir() and entry.name != "__pycache__":
            found += _texts(entry, f"{prefix}{entry.name}/")
        elif entry.is_file() and not entry.name.endswith((".pyc", ".so", "errors.json")):
            found.append((prefix + entry.name, entry.read_text(encoding="utf-8")))
    return found


def _copied(source: str, name: str) -> dict[str, str]:
    """The package `elman_SOURCE` and its tests with the variant's name replaced everywhere."""
    spec = importlib.util.find_spec(f"elman_{source}")
    if spec is None or spec.origin is None:
        raise ConfigError(f"variant {source!r} has no package elman_{source} of its own, so it cannot be copied")
    package = Path(spec.origin).parent
    if not (package.parent / "tests").is_dir():
        raise ConfigError(f"{source} is installed without its tests, which a copy needs: pip install -e its folder")
    old, new = class_name(source), class_name(name)
    kin = "(?=[a-z]{0,2}(?![a-zA-Z0-9]))" if source[-1].isdigit() else "(?![a-zA-Z0-9])"  # e61b is a kernel of e61
    word = re.compile(rf"(?<![a-zA-Z0-9]){source}{kin}")
    files = {}
    for path, text in [*_texts(package, f"{package.name}/"), *_texts(package.parent / "tests", "tests/")]:
        if path == f"{package.name}/__init__.py":
            text = _without(text, NOT_COPIED)
        elif path.startswith("tests/test_") and path != f"tests/test_{source}.py":
            continue  # of the original's names and figures
        text = re.sub(rf"(?<![a-zA-Z0-9]){old}(?![a-z0-9])", new, word.sub(name, text))
        files[word.sub(name, path)] = text.replace(f"class Test{old}(", f"class Test{new}(")
    return files


def _without(text: str, names: tuple[str, ...]) -> str:
    """The source of a module without the arguments `names` of its calls of `Variant`, and without imports for them alone."""
    tree, source = ast.parse(text), text.encode()
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "Variant"]
    dropped = [k for call in calls for k in call.keywords if k.arg in names]
    lines = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]

    def used(nodes: Iterable[ast.AST]) -> Counter[str]:
        return Counter(part.id for node in nodes for part in ast.walk(node) if isinstance(part, ast.Name))

    def span(node: Any) -> tuple[int, int]:
        return lines[node.lineno - 1] + node.col_offset, lines[node.end_lineno - 1] + node.end_col_offset

    gone = used(dropped)
    unused = {name for name, count in used([tree]).items() if count == gone[name]}
    edits = [(*span(node), b"") for node in dropped]
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and any(alias.name in unused for alias in node.names):
            node.names = [alias for alias in node.names if alias.name not in unused]
            edits.append((*span(node), ast.unparse(node).encode() if node.names else b""))
    for first, last, rest in sorted(edits, reverse=True):
        if not rest:  # with its comma, and with its line if nothing else is there
            last += len(re.match(rb",?[ \t]*", source[last:])[0])  # type: ignore[index]
            indent = first - len(source[:first].rstrip(b" \t"))
            if source[first - indent - 1 : first - indent] in (b"", b"\n") and source[last : last + 1] == b"\n":
                first, last = first - indent, last + 1
        source = source[:first] + rest + source[last:]
    return source.decode()
