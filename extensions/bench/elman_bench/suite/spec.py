"""The TOML file of a suite: models, sizes, seeds, values of tuned settings, and one protocol for all models.

summary = "one line"
sizes = ["50M", "100M"]     # parameters; the width of each model is found, to 2 %. Or a model names its size: NAME@1536x6
depth = 20
seeds = 3                   # that many, from train.seed on; or a list
models = ["mamba2", {model = "e99:wide", label = "wide", depth = 6, options = {expansion = 2.0}}]

[tuned]                     # each value is run; the best value of each model is compared
"train.lr" = [3e-4, 1e-3]

[tuning]                    # optional: each value is tried on so many bytes, and only the best is trained to the end
tokens = 10_000_000

[protocol.train]            # settings, as in a recipe
batch_size = 32
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elman_bench.results.identity import flatten
from elman_core.extension import TUNABLE, ConfigError, did_you_mean, folders, from_dict, known_keys, parse_size

KEYS = ("summary", "sizes", "depth", "seeds", "gpus", "models", "tuned", "tuning", "protocol")
MODEL_KEYS = ("model", "label", "sizes", "depth", "options", "tuned")
OPTION = "model.options."
_KINDS: dict[str, tuple[Any, str]] = {
    "summary": (str, "a text"), "label": (str, "a text"), "models": (list, "a list"), "sizes": (list, "a list"),
    "depth": (int, "a number of layers"), "gpus": (int, "a number of GPUs of each run"),
    "tokens": (int, "the bytes of each trial"), "options": (dict, "a table"), "tuning": (dict, "a table"),
    "tuned": (dict, "a table of settings and their values"), "protocol": (dict, "a table of settings"),
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """A model of a suite: `name[:preset][@WIDTHxDEPTH]`, its label in tables, and its own values of the suite's keys."""

    model: str
    label: str
    sizes: tuple[str, ...] | None = None
    depth: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    tuned: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    @property
    def variant(self) -> str:
        """The variant's own name, without preset and size."""
        return re.split("[:@]", self.model)[0]


@dataclass(frozen=True)
class Suite:
    """The content of a suite's file.

    Attributes:
        gpus: of each run. tuning: bytes of each trial of the tuned values; None: every value is trained to the end.
        text: the file's text.
    """

    name: str
    summary: str
    models: tuple[Entry, ...]
    sizes: tuple[str, ...] = ()
    depth: int | None = None
    seeds: int | tuple[int, ...] = 3
    tuned: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    protocol: Mapping[str, Any] = field(default_factory=dict)
    gpus: int = 1
    tuning: int | None = None
    text: str = ""


def shipped() -> dict[str, Path]:
    """The suites of the core and of installed plugins (in recipes/suites), by name."""
    return {path.stem: path for folder in folders() for path in sorted((folder / "suites").glob("*.toml"))}


def find_suite(what: str) -> Path:
    """The file of a suite, given its path or its name if it is shipped. Raises `ConfigError`."""
    found = shipped()
    path = Path(what).expanduser()
    if what in found:
        return found[what]
    if what.endswith(".toml") and path.is_file():
        return path
    meant = did_you_mean(what, [*found, *map(str, path.parent.glob("*.toml"))])
    raise ConfigError(f"there is no suite {what!r}.{meant} Shipped: {', '.join(found)}")


def read_suite(path: Path) -> Suite:
    """Read a suite's file and check all that can be checked without the models.

    Raises:
        ConfigError: the file cannot be read, is not TOML, or has a wrong key or value.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        tree = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot read suite {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"suite {path} is not valid TOML: {error}") from error
    return parse_suite(tree, path.stem, text)


def parse_suite(tree: Mapping[str, Any], name: str, text: str = "") -> Suite:
    """The suite that a file's content means. Raises `ConfigError` for a wrong key or value."""
    where = f"suite {name}: "
    _check(tree, KEYS, where)
    protocol = _protocol(tree.get("protocol", {}), where)
    models = tuple(_entry(given, where) for given in tree.get("models", []))
    if not models:
        raise ConfigError(f"{where}it names no models: models = ['NAME', …]")
    labels = [entry.label for entry in models]
    if twice := [label for label, count in Counter(labels).items() if count > 1]:
        raise ConfigError(f"{where}two models are called {twice[0]!r}: give one a label = '…'")
    return Suite(
        name=name,
        summary=tree.get("summary", ""),
        models=models,
        sizes=_sizes(tree) or (),
        depth=tree.get("depth"),
        seeds=_seeds(tree.get("seeds", 3), where),
        tuned=_tuned(tree.get("tuned", {}), where),
        protocol=protocol,
        gpus=tree.get("gpus", 1),
        tuning=_tuning(tree, models, where),
        text=text,
    )


def _entry(given: Any, where: str) -> Entry:
    if isinstance(given, str):
        given = {"model": given}
    if not isinstance(given, Mapping) or not isinstance(given.get("model"), str):
        raise ConfigError(f"{where}a model is 'NAME' or {{model = 'NAME', …}}, not {given!r}")
    name, width, _ = parse_size(given["model"])
    where = f"{where}model {given['model']}: "
    _check(given, MODEL_KEYS, where)
    sizes, depth = _sizes(given), given.get("depth")
    if width is not None and (sizes or depth):
        raise ConfigError(f"{where}its size is in its name: leave out sizes and depth")
    return Entry(
        given["model"],
        given.get("label", name),
        sizes,
        depth,
        given.get("options", {}),
        _tuned(given.get("tuned", {}), where),
    )


def _protocol(tree: Mapping[str, Any], where: str) -> dict[str, Any]:
    settings = from_dict(tree, f"{where}protocol: ")
    given = {f"{table}.{name}" for table, values in tree.items() for name in values}
    if taken := given & {"model.variant", "model.options", "model.hidden_size", "model.num_hidden_layers"}:
        raise ConfigError(f"{where}protocol: {min(taken)} belongs to a model, not to the protocol")
    if settings.train.tuned:
        raise ConfigError(f"{where}protocol: train.tuned is written by the suite itself, from its table tuned")
    return dict(tree)


def _tuned(tree: Mapping[str, Any], where: str) -> dict[str, tuple[Any, ...]]:
    """`{key: values}`; one value is a list of one."""
    found = {}
    for key, values in flatten(tree).items():
        if not key.startswith(OPTION) and key not in TUNABLE:
            known = key in known_keys()
            hint = "is part of the protocol, the same for all models" if known else "is not a setting"
            raise ConfigError(
                f"{where}tuned: {key} {hint}.{did_you_mean(key, TUNABLE)} These can be tuned: {', '.join(TUNABLE)}, {OPTION}*"
            )
        found[key] = tuple(values if isinstance(values, list) else [values])
        if not found[key]:
            raise ConfigError(f"{where}tuned: {key} has no values")
    return found


def _tuning(tree: Mapping[str, Any], models: Sequence[Entry], where: str) -> int | None:
    if (table := tree.get("tuning")) is None:
        return None
    _check(table, ("tokens",), f"{where}tuning: ")
    if "tokens" not in table:
        raise ConfigError(f"{where}tuning needs tokens: the bytes of each trial")
    if not tree.get("tuned") and not any(entry.tuned for entry in models):
        raise ConfigError(f"{where}tuning needs a table tuned with the values to try")
    return int(table["tokens"])


def _sizes(tree: Mapping[str, Any]) -> tuple[str, ...] | None:
    from elman_bench.size import parse_parameters

    if "sizes" not in tree:
        return None
    sizes = tuple(str(size) for size in tree["sizes"])
    for size in sizes:
        parse_parameters(size)
    return sizes


def _seeds(given: Any, where: str) -> int | tuple[int, ...]:
    listed = given if isinstance(given, list) else [given]
    if not listed or not all(isinstance(s, int) and not isinstance(s, bool) and s >= 0 for s in listed):
        raise ConfigError(f"{where}seeds is a number of seeds or a list of seeds, not {given!r}")
    if isinstance(given, list):
        return tuple(dict.fromkeys(given))
    if given < 1:
        raise ConfigError(f"{where}seeds is at least 1")
    return given


def _check(tree: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    """Raise `ConfigError` for an unknown key, or a value of another kind than `_KINDS` says."""
    for key, value in tree.items():
        if key not in known:
            raise ConfigError(f"{where}there is no key {key!r}.{did_you_mean(key, known)} Keys: {', '.join(known)}")
        kind, words = _KINDS.get(key, (object, ""))
        if not isinstance(value, kind) or (kind is int and (isinstance(value, bool) or value < 1)):
            raise ConfigError(f"{where}{key} is {words}, not {value!r}")
