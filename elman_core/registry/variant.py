"""`Variant`: one named mixer with its typed options, as plain data that a plugin yields."""

from __future__ import annotations

import dataclasses
import math
import operator
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

from .errors import ConfigError, did_you_mean

if TYPE_CHECKING:  # a variant is plain data: describing one does not need torch
    from .mixer import Mixer

Options = Mapping[str, Any]


def option(
    default: Any,
    help: str,
    *,
    ge: float | None = None,
    le: float | None = None,
    gt: float | None = None,
    lt: float | None = None,
    multiple_of: int | None = None,
) -> Any:
    """A field of a config dataclass, with the help that `elman show` prints and the bounds checked before a model is built.

    Choices are written as the field's type: `gate: Literal["none", "silu"] = option("none", "output gate")`.

    Args:
        default: every option has one.
        help: one line, the unit included.
        ge, le, gt, lt: bounds. multiple_of: for sizes.
    """
    bounds = {"ge": ge, "le": le, "gt": gt, "lt": lt, "multiple_of": multiple_of}
    return field(default=default, metadata={"help": help, **{k: v for k, v in bounds.items() if v is not None}})


@dataclass(frozen=True)
class Published:
    """A published figure, for `elman show`: the model, what was measured, on which hardware, and how reliable it is.

    Attributes:
        model: "e99:preset@1536x6"; the contract counts its parameters.
        parameters: of the whole model, or None if the publication does not say.
        figures: with their units. note: the setting, and reasons to doubt the figure.
    """

    model: str
    parameters: int | None
    figures: str
    note: str = ""


@dataclass(frozen=True)
class Variant:
    """A named mixer with typed options and presets. Plugins yield these from the hook `elman_variants`.

    Attributes:
        name: lower case, "e99".
        summary: one line for `elman list`.
        config: frozen dataclass; every field has a default and is made with `option`.
        mixer: class called as `mixer(dim, config, layer_idx)`; or a tuple of such classes, one for each residual branch of a
            layer. `branch(index)` is the class of one branch; `layer_idx` counts the branches of the whole ladder.
        equation: the recurrence in a line or two of plain text; or a function of the config, where options change it.
        presets: `{"h32n16": {"n_heads": 32, "n_state": 16}}` gives "e99:h32n16"; states what differs from the defaults.
        aliases: other names for a preset or for options, such as published level names: `{"E99f_h32n16": "h32n16"}`;
            an empty string means the variant itself. Case is ignored.
        parse_alias: recognises families of names; returns options, or None if the name does not belong to this variant.
        recommended: the preset to start with, where it is not the defaults; `elman show` marks it and prints its equation.
        published: figures for `elman show`.
        requires: importable modules without which the variant cannot run at all.
        accelerated_by: optional modules, `{module: command that installs it}`; without them a plain PyTorch path runs.
        kernels: an `elman_core.kernels.KernelSpec` for each of its kernels, for `elman build` and `elman verify`.
    """

    name: str
    summary: str
    config: type
    mixer: type[Mixer] | tuple[type[Mixer], ...]
    equation: str | Callable[[Any], str] = ""
    presets: Mapping[str, Options] = field(default_factory=dict)
    aliases: Mapping[str, str | Options] = field(default_factory=dict)
    parse_alias: Callable[[str], Options | None] | None = None
    recommended: str = ""
    published: tuple[Published, ...] = ()
    requires: tuple[str, ...] = ()
    accelerated_by: Mapping[str, str] = field(default_factory=dict)
    kernels: tuple[Any, ...] = ()

    @property
    def branches(self) -> int:
        """Residual branches in one layer; a transformer layer has two."""
        return len(self.mixer) if isinstance(self.mixer, tuple) else 1

    def __repr__(self) -> str:
        return f"<variant {self.name}: {self.summary}>"

    def branch(self, index: int) -> type[Mixer]:
        """The mixer's class of residual branch `index` of a layer, from 0."""
        return self.mixer[index] if isinstance(self.mixer, tuple) else self.mixer

    def equation_of(self, config: Any = None) -> str:
        """The recurrence with the options of `config`; by default those of the variant."""
        return self.equation if isinstance(self.equation, str) else self.equation(config or self.config())

    def installs(self, missing: Callable[[str], bool]) -> list[str]:
        """The commands that install what would accelerate this variant and is `missing`, each once."""
        return list(dict.fromkeys(how for module, how in self.accelerated_by.items() if missing(module)))

    def make_config(self, options: Options | None = None, preset: str | None = None) -> Any:
        """The config dataclass for a preset with `options` on top. Raises `ConfigError`: an unknown preset or option, a wrong
        type or a value out of range; it names the valid set and the nearest value."""
        values: dict[str, Any] = {}
        if preset:
            if preset not in self.presets:
                if "=" in preset:
                    name, _, given = f"{self.name}:{preset}".rpartition(":")
                    sets = " ".join(f"--set model.options.{each}" for each in given.split(","))
                    raise ConfigError(f"options do not belong in a name: type {name} {sets}, not {self.name}:{preset}")
                known = ", ".join(sorted(self.presets)) or "none"
                hint = did_you_mean(preset, self.presets)
                raise ConfigError(f"variant {self.name!r} has no preset {preset!r}.{hint} Presets: {known}")
            values.update(self.presets[preset])
        values.update(options or {})
        hints = typing.get_type_hints(self.config)
        known_fields = {f.name: f for f in dataclasses.fields(self.config)}
        checked = {}
        for name, value in values.items():
            if name not in known_fields:
                hint = did_you_mean(str(name), known_fields)
                raise ConfigError(
                    f"variant {self.name!r} has no option {name!r}.{hint} Options: {', '.join(known_fields) or 'none'}"
                )
            where = f"option {name!r} of variant {self.name!r}"
            checked[name] = check_value(where, value, hints[name], known_fields[name].metadata)
        return self.config(**checked)

    def check(self, dim: int, config: Any) -> None:
        """Raise `ConfigError` if this width and these options cannot be built together."""
        if not isinstance(dim, int) or dim < 1:
            raise ConfigError(f"the width must be a positive integer, not {dim!r}")
        for index in range(self.branches):
            self.branch(index).validate(dim, config)


def config_to_dict(config: Any) -> dict[str, Any]:
    """Every option of a config, defaults included, as plain JSON values."""
    return dataclasses.asdict(config)


def check_value(where: str, value: Any, expected: Any, limits: Mapping[str, Any] = types.MappingProxyType({})) -> Any:
    """`value` as the type `expected`, within `limits`, or a `ConfigError` that starts with `where`.

    Strings are not converted here (`--set` parses them first). An int is accepted for a float, NumPy's for both; a bool is not.
    """
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ConfigError(f"{where} must fit in 64 bits, not {value}")
    chosen = _as_type(value, expected)
    if chosen is _NO:
        raise ConfigError(f"{where} must be {type_name(expected)}, not {value!r}")
    if isinstance(chosen, float) and not math.isfinite(chosen):
        raise ConfigError(f"{where} must be finite, not {value!r}")
    if isinstance(chosen, (int, float)) and not isinstance(chosen, bool):
        _check_limits(where, chosen, limits)
    return chosen


def is_of(value: Any, expected: Any) -> bool:
    """Whether `check_value` would accept `value` as the type `expected`."""
    return _as_type(value, expected) is not _NO


_NO = object()
_NUMBERS = {int: Integral, float: Real}


def _as_type(value: Any, expected: Any) -> Any:
    origin = get_origin(expected)
    if origin is Literal:
        return value if any(value == a and type(value) is type(a) for a in get_args(expected)) else _NO
    if origin in (Union, types.UnionType):
        for part in get_args(expected):
            chosen = _as_type(value, part)
            if chosen is not _NO:
                return chosen
        return _NO
    if expected is type(None):
        return None if value is None else _NO
    if expected in _NUMBERS:
        return expected(value) if isinstance(value, _NUMBERS[expected]) and not isinstance(value, bool) else _NO
    if origin in (tuple, list):
        parts = get_args(expected)
        if not isinstance(value, (list, tuple)):
            return _NO
        items = [_as_type(v, parts[0] if parts else Any) for v in value]
        return _NO if any(i is _NO for i in items) else origin(items)
    if expected is Any:
        return value
    return value if isinstance(expected, type) and isinstance(value, expected) else _NO


def type_name(expected: Any) -> str:
    """The type of an option in words: "an integer", "one of 'none', 'silu'"."""
    origin = get_origin(expected)
    if origin is Literal:
        return "one of " + ", ".join(repr(a) for a in get_args(expected))
    if origin in (Union, types.UnionType):
        return " or ".join(type_name(p) for p in get_args(expected))
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a text", type(None): "none"}
    return names.get(expected, getattr(expected, "__name__", str(expected)))


def range_text(limits: Mapping[str, Any]) -> str:
    """The limits of an option in words: "at least 1, a multiple of 8"; empty without limits."""
    words = {"ge": "at least", "gt": "greater than", "le": "at most", "lt": "less than", "multiple_of": "a multiple of"}
    return ", ".join(f"{words[k]} {v}" for k, v in limits.items() if k in words)


def _check_limits(where: str, value: float, limits: Mapping[str, Any]) -> None:
    tests = (("ge", operator.ge), ("gt", operator.gt), ("le", operator.le), ("lt", operator.lt))
    for key, holds in tests:
        if key in limits and not holds(value, limits[key]):
            raise ConfigError(f"{where} must be {range_text({key: limits[key]})}, not {value}")
    step = limits.get("multiple_of")
    if step and value % step:
        low, high = value // step * step, -(-value // step) * step
        near = f"{high}" if low < limits.get("ge", step) else f"{low} or {high}"
        raise ConfigError(f"{where} must be a multiple of {step}, not {value}; nearest: {near}")
