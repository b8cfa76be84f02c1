"""Find plugins by entry point and answer "which variants are there?". One broken plugin breaks one plugin."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pluggy

from elman_core.imports import without_collection

from . import hookspecs
from .checks import check_hooks, collect, is_missing, needs_core, one_line, said_when_slow, shared_state_kept
from .errors import PluginError, did_you_mean, nearest, printable
from .installing import how_to_install, pip_install
from .variant import Variant

GROUP = "elman"
log = logging.getLogger("elman_core")


def entry_points(groups: str) -> list[metadata.EntryPoint]:
    """The entry points whose group matches a regular expression, by name, without those of packages that cannot be read."""
    found: dict[tuple[str, str, str], metadata.EntryPoint] = {}
    for dist in metadata.distributions():
        with contextlib.suppress(Exception):  # of one broken package, which `Plugins` reports
            for point in dist.entry_points:
                named = point.name.isprintable() and point.module.partition(".")[0].isidentifier()
                if named and re.fullmatch(groups, point.group):
                    found.setdefault((point.name, package_of(point), point.group), point)
    return [found[key] for key in sorted(found)]


def package_folders(group: str = GROUP) -> list[Path]:
    """The folders of the packages that have an entry point in `group`, by its name. None of them is imported."""
    names = dict.fromkeys(point.module.partition(".")[0] for point in entry_points(re.escape(group)))
    specs = [importlib.util.find_spec(name) for name in names]
    return [Path(spec.origin).parent for spec in specs if spec is not None and spec.origin is not None]


@dataclass(frozen=True)
class Installed:
    """A variant with the package it came from; `needs` names what is missing before it can run."""

    variant: Variant
    package: str
    version: str
    needs: tuple[str, ...] = ()

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


@dataclass(frozen=True)
class Broken:
    """A plugin that could not be loaded."""

    entry_point: str
    package: str
    version: str
    error: BaseException

    def __str__(self) -> str:
        return f"plugin {self.package} {self.version} is broken: {one_line(self.error)}"


@dataclass(frozen=True)
class NotLoaded:
    """A plugin that was left out because it was made for another core."""

    entry_point: str
    package: str
    version: str
    needs: str


@dataclass
class _Owner:
    package: str
    version: str
    plugin: Any
    variants: tuple[Variant, ...]


class Plugins:
    """The plugins of this process: loaded once, each in isolation."""

    def __init__(self) -> None:
        self.manager = pluggy.PluginManager(GROUP)
        self.manager.add_hookspecs(hookspecs)
        self.owners: dict[str, _Owner] = {}
        self.broken: list[Broken] = []
        self.not_loaded: list[NotLoaded] = []
        self.installed: dict[str, Installed] = {}
        self.conflicts: dict[str, list[Installed]] = {}

    @property
    def hook(self) -> Any:
        return self.manager.hook

    def load(self) -> None:
        """Load every entry point of the group, or those that `ELMAN_PLUGINS` names (comma-separated; empty for none)."""
        only = os.environ.get("ELMAN_PLUGINS")
        wanted = None if only is None else {n.strip() for n in only.split(",") if n.strip()}
        # Of two packages with one module, that of the module's name counts.
        points = sorted(
            self._points(), key=lambda e: (e.value.replace("_", "-") != package_of(e), e.name, package_of(e))
        )
        for point in points:
            if wanted is None or point.name in wanted or package_of(point) in wanted:
                self._load_one(point)
        names = [point.name for point in points]
        unknown = (wanted or set()).difference(names, map(package_of, points))
        if unknown:
            raise PluginError(
                f"ELMAN_PLUGINS names {', '.join(sorted(unknown))}, which is not installed."
                f"{did_you_mean(min(unknown), names)} {nearest(min(unknown), names)}"
            )
        self._index()

    def _points(self) -> Iterator[metadata.EntryPoint]:
        """The entry points of the group; of two distributions with one name the first on the path counts."""
        seen: set[str] = set()
        for dist in metadata.distributions():
            try:
                points = [p for p in dist.entry_points if p.group == GROUP]
                name = package_of(points[0]) if points else ""
            except Exception as error:  # metadata that cannot be read
                where = getattr(dist, "_path", None)
                self._leave_out(Broken("?", where.stem if where else "?", "?", error))
                continue
            if name not in seen:
                yield from points
                seen.add(name)

    def _leave_out(self, broken: Broken) -> None:
        if os.environ.get("ELMAN_STRICT", "0") not in ("", "0"):
            raise PluginError(str(broken)) from broken.error
        self.broken.append(broken)
        log.warning("elman: %s", broken)

    def _load_one(self, point: metadata.EntryPoint) -> None:
        package, version = package_of(point), "0"
        key = f"{package}:{point.name}"
        try:
            version = (point.dist.version if point.dist else None) or "0"
            if needs := needs_core(point.dist):
                self.not_loaded.append(NotLoaded(point.name, package, version, needs))
                return
            with said_when_slow(lambda: f"{_importing(package)} to be imported"):
                with shared_state_kept():
                    plugin = point.load()
                same = [owner.package for owner in self.owners.values() if owner.plugin is plugin]
                if same:
                    raise PluginError(f"its module {point.value} is that of {same[0]}, too: pip uninstall {package}")
                check_hooks(plugin)
                self.manager.register(plugin, name=key)
                impls = [i for i in self.hook.elman_variants.get_hookimpls() if i.plugin_name == key]
                self.owners[key] = _Owner(package, version, plugin, collect(i.function() for i in impls))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # whatever a plugin raises must not take others along
            if self.manager.has_plugin(key):  # pluggy keeps a plugin whose hooks did not validate
                self.manager.unregister(name=key)
            self._leave_out(Broken(point.name, package, version, error))

    def _index(self) -> None:
        entries: dict[str, list[Installed]] = {}
        for owner in self.owners.values():
            for variant in owner.variants:
                needs = tuple(m for m in variant.requires if is_missing(m))
                entry = Installed(variant, owner.package, owner.version, needs)
                entries.setdefault(variant.name, []).append(entry)
        self.installed = {name: found[0] for name, found in entries.items() if len(found) == 1}
        self.conflicts = {name: found for name, found in entries.items() if len(found) > 1}

    def get(self, name: str, made_with: str | None = None) -> Installed:
        """The variant of that exact name.

        Args:
            made_with: the requirement a checkpoint names, such as "elman-e99==0.1.0".

        Raises:
            PluginError: not installed, defined twice, broken, or needing what is not there. The cause is chained.
        """
        if name in self.conflicts:
            packages = " and ".join(i.package for i in self.conflicts[name])
            one = self.conflicts[name][0].package
            raise PluginError(
                f"variant {name!r} is defined twice, by {packages}: uninstall one, or choose with ELMAN_PLUGINS={one}"
            )
        if name in self.installed:
            entry = self.installed[name]
            if needs := entry.needs:
                raise PluginError(f"variant {name!r} needs {', '.join(needs)}: pip install {' '.join(needs)}")
            return entry
        raise self._missing(name, made_with)

    def _missing(self, name: str, made_with: str | None) -> PluginError:
        there = any(broken.entry_point == name for broken in self.broken)
        here = os.path.isfile(Path(__file__).parents[2] / "plugins" / name / "pyproject.toml")
        words = [f"no variant {name!r} is installed." + ("" if there else did_you_mean(name, self.installed))]
        cause: BaseException | None = None
        for broken in self.broken:  # any of them might have brought it
            words.append(f"P{str(broken)[1:]}.")
            if cause is None or broken.entry_point == name or _made_by(broken.package, made_with):
                cause = broken.error
        for left in self.not_loaded:
            if left.entry_point == name or _made_by(left.package, made_with):
                words.append(f"{left.package} {left.version} needs {left.needs}: {how_to_install(left.needs)}.")
        if made_with and not there:
            words.append(f"The checkpoint was made with {made_with}: {how_to_install(made_with.split('==')[0])}")
        else:
            hints = (
                ("," in name, f"Join the variants of one model with +: {name.replace(',', '+')}."),
                ("@" in name, f"Give the name without a size: {name.partition('@')[0]}."),
                (here, f"{name} is in this checkout: {pip_install(f'elman-{name}')}."),
            )
            words += [hint for fits, hint in hints if fits]
            words.append(nearest(name, self.installed))
        error = PluginError(" ".join(words))
        error.__cause__ = cause
        return error


def package_of(point: metadata.EntryPoint) -> str:
    """The normalised name of the distribution of an entry point."""
    name = point.dist.name if point.dist else None  # None, too, where the metadata has no name
    return re.sub(r"[-_.]+", "-", name).lower() if name else printable(point.value.partition(":")[0])


def _importing(package: str) -> str:
    """Return the slow import of a plugin: torch, which the first plugin imports, or the plugin itself."""
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    return "torch" if getattr(spec, "_initializing", False) else f"plugin {package}"


def _made_by(package: str, made_with: str | None) -> bool:
    return made_with is not None and made_with.startswith(package + "==")


@functools.cache
def plugins() -> Plugins:
    """The plugins of this process, loaded on the first call."""
    loaded = Plugins()
    with without_collection():
        loaded.load()
    return loaded
