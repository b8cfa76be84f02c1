"""What `elman new` writes: the template, or the sources of an installed plugin under another name."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib.util
import keyword
import re
from collections import Counter
from collections.abc import Iterable
from importlib import resources
from importlib.abc import Traversable
from pathlib import Path

from elman_core import __version__
from elman_core.registry import ConfigError, Variant, plugins

# What a copied plugin must not claim for itself: names and figures that belong to the original.
NOT_COPIED = ("aliases", "parse_alias", "published")

_WIDTH = 512  # of the check whether options go together

# A copied variant may have other options and another kind of kernel than the template.
_VARIANT_TEST = """\
from elman_core.testing import VariantContract


class Test{Name}(VariantContract):
    variant = "{name}"
    options = {options}
"""
_KERNEL_TEST = """\
from elman_core.registry import get_variant
from elman_core.testing import KernelContract, VariantContract


class Test{Name}(VariantContract):
    variant = "{name}"
    options = {options}


class Test{Name}Kernel(KernelContract):
    spec = get_variant("{name}").kernels[0]
"""


def class_name(name: str) -> str:
    """ "e99" is E99, "leaky_cell" is LeakyCell."""
    return "".join(part.capitalize() for part in name.split("_"))


def render(name: str, folder: Path, source: str | None = None) -> tuple[Path, list[str]]:
    """Write a plugin; returns its folder and the files in it.

    Args:
        name: of the variant. source: an installed variant to copy; None for the template.
        folder: the plugin goes to `folder/NAME`, or to `folder/plugins/NAME` where `folder/plugins` holds packages already.

    Raises:
        ConfigError: a name that cannot be used or is taken, a folder that exists, a source that cannot be copied.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ConfigError(f"a variant's name is lower case letters, digits and _, such as e99, not {name!r}")
    if (taken := plugins().installed.get(name)) is not None:
        raise ConfigError(f"variant {name!r} is already there, from {taken.requirement}: choose another name")
    target = (folder / "plugins" if any(folder.glob("plugins/*/pyproject.toml")) else folder) / name
    if target.exists():
        raise ConfigError(f"{target} exists: choose another name or --dir")
    files = _filled(resources.files("elman_core") / "template" / "variant", name)
    if source is not None:
        package = f"elman_{name}/"
        files = {p: text for p, text in files.items() if not p.startswith(package)}
        files |= {package + p: text for p, text in _copied(source, name).items()}
        test = f"tests/test_{name}_contract.py"
        original = plugins().get(source).variant
        words = {"name": name, "Name": class_name(name), "options": _options(original)}
        files[test] = (_KERNEL_TEST if original.kernels else _VARIANT_TEST).format(**words)
        files["README.md"] = re.sub("`h_t = .*`(?=\\. Install)", f"`{original.equation}`", files["README.md"])
    for path, text in files.items():
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        (target / path).write_text(text, encoding="utf-8")
    return target, sorted(files)


def _options(original: Variant) -> str:
    """What the contract of a copy runs with: the defaults, and all that is off by default and can be on together.

    Without the second an option that belongs to a part which is off, such as the width of a convolution, would do nothing.
    """
    defaults = original.make_config()
    flags: dict[str, bool] = {}
    for field in dataclasses.fields(defaults):
        if getattr(defaults, field.name) is False:
            with contextlib.suppress(ConfigError):
                original.check(_WIDTH, original.make_config({**flags, field.name: True}))
                flags[field.name] = True
    on = ", ".join(f'"{flag}": True' for flag in flags)
    return f"(\n        {{}},\n        {{{on}}},\n    )" if flags else "({},)"


def _filled(template: Traversable, name: str) -> dict[str, str]:
    major, minor = __version__.split(".")[:2]
    words = {
        "name": name, "Name": class_name(name), "core": f"{major}.{minor}", "next": f"{major}.{int(minor) + 1}",
    }  # fmt: skip
    files = {}
    for path, text in _texts(template):
        for word, value in words.items():
            text = text.replace("{{" + word + "}}", value)
        files[path.replace("NAME", name)] = text
    return files


def _texts(folder: Traversable, prefix: str = "") -> list[tuple[str, str]]:
    found = []
    for entry in sorted(folder.iterdir(), key=lambda e: e.name):
        if entry.is_dir() and entry.name != "__pycache__":
            found += _texts(entry, f"{prefix}{entry.name}/")
        elif entry.is_file() and not entry.name.endswith((".pyc", ".so")):
            found.append((prefix + entry.name, entry.read_text(encoding="utf-8")))
    return found


def _copied(source: str, name: str) -> dict[str, str]:
    """The files of the package `elman_SOURCE` with the variant's name replaced everywhere."""
    plugins().get(source)
    spec = importlib.util.find_spec(f"elman_{source}")
    if spec is None or spec.origin is None:
        raise ConfigError(f"variant {source!r} is not in a package elman_{source} of its own and cannot be copied")
    old, new = class_name(source), class_name(name)
    files = {}
    for path, text in _texts(Path(spec.origin).parent):
        if path.startswith("recipes/"):  # the settings of published figures
            continue
        if path == "__init__.py":
            text = _without(text, NOT_COPIED)
        word = re.compile(rf"(?<![a-zA-Z0-9]){source}(?![a-zA-Z0-9])")
        text = re.sub(rf"(?<![a-zA-Z0-9]){old}(?![a-z0-9])", new, word.sub(name, text))
        files[word.sub(name, path)] = text
    return files


def _without(text: str, names: tuple[str, ...]) -> str:
    """The source of a module without the arguments `names` of its calls of `Variant`, and without imports for them alone."""
    tree = ast.parse(text)
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "Variant"]
    dropped = [k for call in calls for k in call.keywords if k.arg in names]
    lines: list[str | None] = [*text.splitlines(keepends=True)]

    def used(nodes: Iterable[ast.AST]) -> Counter[str]:
        return Counter(part.id for node in nodes for part in ast.walk(node) if isinstance(part, ast.Name))

    gone = used(dropped)
    unused = {name for name, count in used([tree]).items() if count == gone[name]}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and any(alias.name in unused for alias in node.names):
            node.names = [alias for alias in node.names if alias.name not in unused]
            rest = ast.unparse(node) + "\n" if node.names else None
            lines[node.lineno - 1 : node.end_lineno] = [
                rest,
                *[None] * ((node.end_lineno or node.lineno) - node.lineno),
            ]
    for keyword_ in dropped:
        first, last = keyword_.lineno - 1, keyword_.end_lineno or keyword_.lineno
        lines[first:last] = [None] * (last - first)
    return "".join(line for line in lines if line is not None)
