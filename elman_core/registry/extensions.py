"""Extensions: packages with entry points in the groups `elman.commands`, `elman.loggers` and the like, each imported when it
is used. Installing one changes no model and no run."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from .checks import needs_core, one_line
from .errors import ConfigError, PluginError, did_you_mean, printable
from .installing import KINDS as KINDS
from .installing import how_to_install, known
from .plugins import GROUP, entry_points, package_of


def extensions(kind: str) -> dict[str, list[metadata.EntryPoint]]:
    """The entry points of a kind, such as "commands", by name. More than one of a name is an error of `load_extension`."""
    points: dict[str, list[metadata.EntryPoint]] = {}
    for point in entry_points(rf"{GROUP}\.{kind}"):
        points.setdefault(point.name, []).append(point)
    return points


def packages() -> dict[str, metadata.Distribution]:
    """The distributions of all plugins and extensions, by the name of their module."""
    points = entry_points(rf"{GROUP}(\..*)?")
    return {point.module.partition(".")[0]: point.dist for point in points if point.dist is not None}


def _need_callable(made: Any) -> None:
    if not callable(made):
        raise TypeError(f"its entry point names a {type(made).__name__}, which cannot be called")


def load_extension(kind: str, name: str, check: Callable[[Any], None] = _need_callable) -> Any:
    """Import the object behind an entry point.

    Args:
        check: raises if the object is not what the kind asks for; usually, something to call.

    Raises:
        ConfigError: there is none of this name; says what to install if that is known.
        PluginError: two packages have it, it is broken, or its package was made for another core.
    """
    points = extensions(kind)
    what = f"{kind.removesuffix('s')} {name!r}"
    if name not in points:
        if package := known(kind).get(name):
            raise ConfigError(f"{what} is not installed: {how_to_install(package)}")
        raise ConfigError(f"there is no {what}.{did_you_mean(name, points)} Installed: {', '.join(points) or 'none'}")
    first, *others = points[name]
    package = package_of(first)
    if others:
        raise PluginError(f"{what} is in {package} and in {package_of(others[0])}: uninstall one")
    if needs := needs_core(first.dist):
        raise PluginError(f"{what} of {package} needs {needs}: {how_to_install(needs)}")
    try:
        made = first.load()
        check(made)
        return made
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever an extension raises
        raise PluginError(f"extension {package} is broken: {one_line(error)}") from error


def summary(point: metadata.EntryPoint) -> str:
    """The docstring of the function that an entry point names, or else of its module, read from the source: nothing is
    imported. An empty string if there is no source or no docstring."""
    top, *inner = point.module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or spec.origin is None:
        return ""
    path = Path(spec.origin).parent.joinpath(*inner)
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    try:
        tree = ast.parse((file if inner else Path(spec.origin)).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ""
    function = next((n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == point.attr), tree)
    return printable(ast.get_docstring(function) or "", "\n\t")
