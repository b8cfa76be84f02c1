"""From what a user writes ("e99", "e99:h32n16", "E99f_h32n16", level 99) to a variant and its options."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .checks import one_line
from .errors import ConfigError
from .plugins import Installed, plugins
from .variant import Variant, config_to_dict

log = logging.getLogger("elman_core")


@dataclass(frozen=True)
class Resolved:
    """A variant with all its options."""

    installed: Installed
    preset: str | None
    config: Any
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def variant(self) -> Variant:
        return self.installed.variant

    @property
    def name(self) -> str:
        return f"{self.variant.name}:{self.preset}" if self.preset else self.variant.name


def resolve(name: str | int, options: Mapping[str, Any] | None = None, made_with: str | None = None) -> Resolved:
    """The variant, preset and full config that `name` and `options` mean. An old level name is resolved and said (logged).
    Raises `PluginError`: no such variant. `ConfigError`: no such preset or option, or a wrong value."""
    base, _, preset = str(name).strip().partition(":")
    loaded = plugins()
    own = base.lower()
    extra: Mapping[str, Any] = {}
    hit = None if own in loaded.installed or own in loaded.conflicts else _by_alias(base, loaded.installed.values())
    if hit is not None:
        entry, target = hit
        own = entry.variant.name
        if isinstance(target, str):
            preset = preset or target
        else:
            extra = target
    installed = loaded.get(own, made_with)  # raises for an unknown name, with what is known
    config = installed.variant.make_config({**extra, **(options or {})}, preset or None)
    if hit is not None:
        meant = f"{own}:{preset}" if preset else own
        with_options = "".join(f", {k}={v!r}" for k, v in extra.items())
        log.warning("elman: level %s is variant %s%s", base, meant, with_options)
    return Resolved(installed, preset or None, config, config_to_dict(config))


def parse_size(text: str) -> tuple[str, int | None, int | None]:
    """`"e99:wide@1536x6"` as ("e99:wide", 1536, 6); without a size the last two are None. Raises `ConfigError`: something after
    @ that is not WIDTHxDEPTH."""
    name, at, size = text.partition("@")
    if not at:
        return name, None, None
    match = re.fullmatch(r"0*([1-9][0-9]{0,5})[xX]0*([1-9][0-9]{0,3})", size)
    if match is None:
        such = f"{name or 'e99'}@1536x6"
        raise ConfigError(f"write a size as NAME@WIDTHxDEPTH, such as {such}, not {text!r}; at most 999999x9999")
    return name, int(match[1]), int(match[2])


def _by_alias(name: str, installed: Iterable[Installed]) -> tuple[Installed, str | Mapping[str, Any]] | None:
    wanted = name.lower()
    hits: list[tuple[Installed, str | Mapping[str, Any]]] = []
    for entry in installed:
        exact = {k.lower(): v for k, v in entry.variant.aliases.items()}
        if wanted in exact:
            hits.append((entry, exact[wanted]))
        elif (options := _parsed(entry, name)) is not None:
            hits.append((entry, options))
    names = sorted({entry.variant.name for entry, _ in hits})
    if len(names) > 1:
        known = ", ".join(names)
        raise ConfigError(f"level {name!r} is ambiguous: it could be any of {known}; write the variant's own name")
    return hits[0] if hits else None


def _parsed(entry: Installed, name: str) -> Mapping[str, Any] | None:
    try:
        options = None if entry.variant.parse_alias is None else entry.variant.parse_alias(name)
        return None if options is None else dict(options)
    except Exception as error:  # of one plugin, asked about a name that may be of another
        log.warning("elman: parse_alias of plugin %s failed: %s", entry.requirement, one_line(error))
        return None


def get_variant(name: str | int) -> Variant:
    """The variant of a name, preset or alias. Raises `PluginError` if it is not installed, `ConfigError` for a wrong preset."""
    return resolve(name).variant


def list_variants() -> dict[str, Installed]:
    """Every usable variant by name, with the package it came from."""
    return dict(sorted(plugins().installed.items()))
