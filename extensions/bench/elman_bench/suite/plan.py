"""The runs of a suite: every installed model at every size, value of a tuned setting, and seed.

Each run has a complete tree of settings, decided here and written to the suite's folder, so that it can be read and repeated.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elman_bench.size import parse_parameters, solve_width
from elman_core.extension import (
    TUNABLE,
    ConfigError,
    PluginError,
    Settings,
    apply_sets,
    count,
    from_dict,
    parse_size,
    put,
    resolve_pattern,
    resolve_settings,
    steps_for_tokens,
)

from .spec import OPTION, Entry, Suite

MOST = 10_000
"""Runs of a suite. Planning one takes about a millisecond."""
LONGEST = 200
"""Characters of a run's name: file systems allow 255 bytes, and its files are called more than that."""


@dataclass(frozen=True)
class Overrides:
    """Changes to a suite from the command line.

    Attributes:
        data: the text. models: labels, variants, or further models; empty for all. seeds: their number, or None.
        steps, tokens, minutes: at most one. sets: `key=value`; a tuned key also takes a list.
        tuning: bytes of each trial, in a suite with trials. strict: whether a model that is not installed is an error.
    """

    data: str
    models: tuple[str, ...] = ()
    seeds: int | None = None
    steps: int | None = None
    tokens: int | None = None
    minutes: float | None = None
    sets: tuple[str, ...] = ()
    tuning: int | None = None
    strict: bool = False


@dataclass(frozen=True)
class Planned:
    """One run of a suite.

    Attributes:
        id: unique in the suite; independent of the number of seeds and models.
        model: the label in tables. what: `name[:preset]@WIDTHxDEPTH`. target: "50M", or None if the size was given.
        tuned: the tuned settings and their values here. parameters: the exact number.
        trials: the runs of which the best decides the tuned values; until they end, `settings` and `lr` hold the first
            value. Empty if the values are known.
    """

    id: str
    model: str
    what: str
    seed: int
    lr: float
    tuned: Mapping[str, Any]
    settings: Settings
    parameters: int
    target: str | None
    trials: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.id) > LONGEST:
            raise ConfigError(
                f"the name of a run, {self.id[:40]}…, is {len(self.id)} characters long, and at most {LONGEST} fit into "
                f"the names of its files: give the model a shorter label"
            )

    @property
    def tokens(self) -> int | None:
        """Bytes that it trains on; None where minutes decide."""
        train = self.settings.train
        steps = train.steps if train.steps is not None or train.minutes is not None else 1000
        return None if steps is None else steps * self.settings.tokens_per_step

    def to_dict(self) -> dict[str, Any]:
        """Its entry in suite.json."""
        return {**dataclasses.asdict(self), "settings": self.settings.to_dict(), "trials": list(self.trials)}


@dataclass(frozen=True)
class Skipped:
    """A model that cannot run here, and the reason."""

    model: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """All runs of a suite, and the models that were left out."""

    jobs: tuple[Planned, ...]
    skipped: tuple[Skipped, ...]


def plan(suite: Suite, overrides: Overrides) -> Plan:
    """The runs of a suite: all models with one seed, then all with the next, so that a suite cut short can be compared.

    Raises:
        ConfigError: wrong settings, options or sizes. PluginError: a model is not installed, with `strict`.
    """
    protocol, axes = _overridden(suite, overrides)
    seeds = _seeds(suite, overrides, protocol)
    entries = chosen(suite, overrides.models)
    tuned_apart = sorted({k for e in (*suite.models, *entries) for k in (*suite.tuned, *e.tuned, *axes)} - {"train.lr"})
    put(protocol, "train.tuned", [key for key in tuned_apart if not key.startswith(OPTION)])
    tuning = suite.tuning
    if overrides.tuning is not None:
        if tuning is None:
            raise ConfigError(f"--tuning needs a suite with trials, and {suite.name} has no table tuning")
        tuning = overrides.tuning
    number = 0
    for entry in entries:
        values = math.prod(map(len, {**suite.tuned, **entry.tuned, **axes}.values()))
        number += values * len(_sizes(entry, suite)) * len(seeds)
    if number > MOST:
        raise ConfigError(f"suite {suite.name} has {number:,} runs, and at most {MOST:,} can be planned: split it")
    runs: list[list[tuple[Planned, ...]]] = []  # of each model and value, the runs of each seed
    skipped: list[Skipped] = []
    for entry in entries:
        try:
            resolve_pattern(parse_size(entry.model)[0], entry.options)
        except PluginError as error:
            if overrides.strict or entry not in suite.models:
                raise
            skipped.append(Skipped(entry.label, re.split(r"\. (?:Did you mean|Installed)", str(error))[0]))
            continue
        tuned = {**suite.tuned, **entry.tuned, **axes}
        for size in _sizes(entry, suite):
            if tuning is None:
                runs += [[(_planned(entry, size, v, seed, protocol),) for seed in seeds] for v in _values(tuned)]
            else:
                runs += _tried_first(entry, size, tuned, seeds, protocol, tuning)
    if not runs:
        raise PluginError(f"no model of suite {suite.name} is installed: {skipped[0].model}: {skipped[0].reason}")
    jobs = tuple(job for same_seed in zip(*runs, strict=True) for group in same_seed for job in group)
    if twice := [id for id, count in Counter(job.id for job in jobs).items() if count > 1]:
        models = sorted({job.model for job in jobs if job.id == min(twice)})
        hint = "give the models different labels" if models[1:] else f"{models[0]} has a size or a tuned value twice"
        raise ConfigError(f"two runs would be called {min(twice)}: {hint}")
    return Plan(jobs, tuple(skipped))


def split_names(suite: Suite, text: str) -> tuple[str, ...]:
    """The names in `text`, which commas separate. A label or model of the suite may have commas itself."""
    words = text.split(",")
    known = {name for entry in suite.models for name in (entry.label, entry.model)}
    found = []
    while words:
        joined = {end: ",".join(words[:end]).strip() for end in range(len(words), 1, -1)}
        end = next((end for end, name in joined.items() if name in known), 1)
        found.append(joined.get(end) or words[0].strip())
        words = words[end:]
    return tuple(filter(None, found))


def chosen(suite: Suite, names: Sequence[str]) -> list[Entry]:
    """The models with these labels or variants; other names are models that join the suite."""
    if not names:
        return list(suite.models)
    found: list[Entry] = []
    for name in names:
        hits = [e for e in suite.models if name in (e.label, e.model)] or [e for e in suite.models if e.variant == name]
        found += [e for e in hits or [Entry(name, parse_size(name)[0])] if e not in found]
    return found


def _overridden(suite: Suite, overrides: Overrides) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
    """The protocol with the changes of the command line, and values of tuned settings that replace the suite's."""
    lengths = sum(given is not None for given in (overrides.steps, overrides.tokens, overrides.minutes))
    if lengths > 1:
        raise ConfigError("give one of --steps, --tokens and --minutes")
    tree: dict[str, Any] = {table: dict(values) for table, values in suite.protocol.items()}
    put(tree, "data.path", overrides.data)
    axes: dict[str, tuple[Any, ...]] = {}
    tuned = set(suite.tuned).union(*(entry.tuned for entry in suite.models))
    for text in overrides.sets:
        key, value = _parsed(text)
        several = isinstance(value, list) and key in TUNABLE
        if key in tuned or several or key.startswith(OPTION):
            axes[key] = tuple(value) if isinstance(value, list) else (value,)
        elif key in _DECIDED:
            raise ConfigError(f"--set {key}: the suite sets it; {_DECIDED[key]}")
        else:
            put(tree, key, value)
    if lengths:
        for length in ("steps", "minutes"):
            tree.setdefault("train", {}).pop(length, None)
    if overrides.steps is not None:
        put(tree, "train.steps", overrides.steps)
    if overrides.minutes is not None:
        put(tree, "train.minutes", float(overrides.minutes))
    if overrides.tokens is not None:
        put(tree, "train.steps", steps_for_tokens(overrides.tokens, from_dict(tree)))
    return tree, axes


_DECIDED = {
    "model.variant": "choose with --models",
    "model.hidden_size": "a model's size is in its name: --models NAME@1536x6",
    "model.num_hidden_layers": "a model's size is in its name: --models NAME@1536x6",
    "model.options": "one at a time: --set model.options.NAME=VALUE",
    "data.path": "give --data FILE",
    "train.tuned": "a list of values makes a setting tuned: --set train.lr=[3e-4,1e-3]",
}


def _parsed(text: str) -> tuple[str, Any]:
    """Key and value of one `--set`."""
    key = text.partition("=")[0].strip()
    tree: Any = apply_sets({}, [text])
    parts = key.split(".", 2)
    if len(parts) == 3:  # an option, perhaps of one variant
        parts[2:] = parts[2].rsplit(".", 1)
    for part in parts:
        tree = tree[part]
    if tree == []:
        raise ConfigError(f"{key} has no values")
    return key, tree


def _seeds(suite: Suite, overrides: Overrides, protocol: Mapping[str, Any]) -> list[int]:
    wanted = overrides.seeds if overrides.seeds is not None else suite.seeds
    if isinstance(wanted, int) and not 1 <= wanted <= 1000:
        raise ConfigError(f"the number of seeds is from 1 to 1000, not {wanted}")
    if isinstance(suite.seeds, tuple):
        listed = list(suite.seeds)
        if isinstance(wanted, tuple):
            return listed
        return (listed + [max(listed) + 1 + i for i in range(wanted)])[:wanted]
    first = from_dict(dict(protocol)).train.seed
    return [first + i for i in range(wanted)]  # type: ignore[arg-type]


def _values(axes: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Every combination of the values of what is tuned."""
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def _sizes(entry: Entry, suite: Suite) -> list[tuple[str | None, int, int]]:
    """(target, width, depth) of each size of a model; the width is 0 if it has to be found."""
    _, width, depth = parse_size(entry.model)
    if width is not None and depth is not None:
        return [(None, width, depth)]
    targets = entry.sizes if entry.sizes is not None else suite.sizes
    depth = entry.depth or suite.depth
    if not targets or depth is None:
        raise ConfigError(
            f"model {entry.label} of suite {suite.name} has no size: name it, as in {entry.model}@1536x6, or give the suite "
            f"sizes and a depth"
        )
    return [(target, 0, depth) for target in targets]


def _planned(
    entry: Entry,
    size: tuple[str | None, int, int],
    values: Mapping[str, Any],
    seed: int,
    protocol: Mapping[str, Any],
    unnamed: Mapping[str, Any] | None = None,
) -> Planned:
    """One run. `unnamed`: further settings, left out of its id."""
    target, width, depth = size
    name = parse_size(entry.model)[0]
    tree: dict[str, Any] = {table: dict(given) for table, given in protocol.items()}
    put(tree, "model.variant", name)
    put(tree, "model.options", dict(entry.options))
    for key, value in {**values, **(unnamed or {})}.items():
        put(tree, key, value)
    put(tree, "train.seed", seed)
    chosen = from_dict(tree)
    options = dict(chosen.model.options) if isinstance(chosen.model.options, dict) else {}
    backbone = (("tie_word_embeddings", chosen.model.tie_word_embeddings), ("mlp_ratio", chosen.model.mlp_ratio))
    width, parameters = _size(name, json.dumps(options), target, width, depth, backbone)
    put(tree, "model.hidden_size", width)
    put(tree, "model.num_hidden_layers", depth)
    settings = from_dict(tree)
    resolve_settings(settings, "cpu", False)  # raises now if settings contradict each other
    label = entry.label
    if not label.isascii():  # its letters are lost below
        label += "-" + hashlib.blake2b(label.encode(), digest_size=3).hexdigest()
    parts = [label, target or f"{width}x{depth}", *(_spelled(k, v) for k, v in values.items()), f"s{seed}"]
    id = re.sub(r"[^A-Za-z0-9_.,=+-]+", "-", "-".join(parts)).lstrip("_.,=+-")  # as a job's name must
    what = f"{name}@{width}x{depth}"
    return Planned(id, entry.label, what, seed, settings.train.lr, dict(values), settings, parameters, target)


def _tried_first(
    entry: Entry,
    size: tuple[str | None, int, int],
    tuned: Mapping[str, Sequence[Any]],
    seeds: Sequence[int],
    protocol: Mapping[str, Any],
    tokens: int,
) -> list[list[tuple[Planned, ...]]]:
    """Trials with the first seed, then one run per seed with the best value.

    Another value of a model option is another model, which has its own trials.
    """
    made: list[list[tuple[Planned, ...]]] = []
    for given in _values({k: v for k, v in tuned.items() if k.startswith(OPTION)}):
        values = list(_values({k: v for k, v in tuned.items() if k not in given}))
        finals = [_planned(entry, size, given, seed, protocol, values[0]) for seed in seeds]
        if len(values) == 1:
            made.append([(final,) for final in finals])
            continue
        trials = [_trial(_planned(entry, size, given | v, seeds[0], protocol), tokens) for v in values]
        ids = tuple(trial.id for trial in trials)
        first, *others = [dataclasses.replace(final, trials=ids) for final in finals]
        made.append([(*trials, first), *((other,) for other in others)])
    return made


def _trial(planned: Planned, tokens: int) -> Planned:
    """The run cut to `tokens` bytes, evaluated and saved only at its end."""
    settings = planned.settings
    steps = steps_for_tokens(tokens, settings)
    train = dataclasses.replace(settings.train, steps=steps, minutes=None, save_every=0, eval_every=0)
    settings = dataclasses.replace(settings, train=train)
    resolve_settings(settings, "cpu", False)
    return dataclasses.replace(planned, id=f"{planned.id}-trial", settings=settings)


@functools.cache
def _size(
    name: str, options: str, target: str | None, width: int, depth: int, backbone: tuple[tuple[str, Any], ...]
) -> tuple[int, int]:
    """Width and exact number of parameters."""
    given = json.loads(options)
    if target is not None:
        width = solve_width(name, given, parse_parameters(target), depth, **dict(backbone))
    return width, count(resolve_pattern(name, given), width, depth, **dict(backbone))


def _spelled(key: str, value: Any) -> str:
    """A tuned value in the name of a job: "lr0.001"."""
    return f"{key.rpartition('.')[2]}{value:g}" if isinstance(value, float) else f"{key.rpartition('.')[2]}{value}"
