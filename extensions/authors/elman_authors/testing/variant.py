"""`VariantContract`: everything a variant promises, as a test class that a plugin subclasses."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from elman_core import ConfigError, Variant
from elman_core.extension import config_to_dict, count, parse_size, resolve

from .equation_contract import EquationContract
from .harness import Options
from .initial import InitialContract
from .kernel import KernelContract
from .mixer_contract import MixerContract
from .model_contract import ModelContract


class VariantContract(KernelContract, EquationContract, InitialContract, MixerContract, ModelContract):
    """Subclass it, set the knobs of `Harness` (`variant`, `options`, `dim`, `values`), and every promise is tested."""

    # what the variant says of itself ----------------------------------------------------------------------------------

    def test_variant_describes_itself(self) -> None:
        variant = self.declared()
        assert variant.name == self.variant
        assert variant.summary, "a summary, for `elman list`"
        assert "\n" not in variant.summary
        for options in ({}, *variant.presets.values(), *self.options):
            assert variant.equation_of(variant.make_config(options)), "an equation, for `elman show`"
        config = variant.make_config()
        assert dataclasses.is_dataclass(config)
        with pytest.raises(dataclasses.FrozenInstanceError):
            config.anything = 1  # type: ignore[union-attr]
        for field in dataclasses.fields(config):
            assert field.metadata.get("help"), f"option {field.name!r} is not made with option(default, help)"
        assert variant.make_config(config_to_dict(config)) == config

    def test_presets_and_aliases_build(self) -> None:
        """Every preset and every published name resolves, and builds at a width that its options allow."""
        variant = self.declared()
        for name in [variant.name, *(f"{variant.name}:{p}" for p in variant.presets), *variant.aliases]:
            resolved = resolve(name)
            assert resolved.variant is variant
            count(resolved, next(_widths(variant, resolved.config, self.dim)), depth=1)

    def test_published_counts_are_exact(self) -> None:
        """Every published figure names a model that resolves, with as many parameters as it says: embedding, norms, layers.
        Where its size is not known, it says none, and no parameters."""
        for row in self.declared().published:
            name, dim, depth = parse_size(row.model)
            resolved = resolve(name)
            assert resolved.variant is self.declared(), row.model
            if row.parameters is not None:
                assert dim is not None, f"{row.model}: write NAME@WIDTHxDEPTH"
                assert depth is not None
                assert count(resolved, dim, depth) == row.parameters, row.model

    def test_unknown_and_ill_typed_options_are_refused(self) -> None:
        variant = self.declared()
        with pytest.raises(ConfigError, match="no option 'no_such_option'"):
            variant.make_config({"no_such_option": 1})
        for field in dataclasses.fields(variant.config):
            for wrong in _wrong_values(variant, field):
                with pytest.raises(ConfigError, match=field.name):
                    variant.make_config({field.name: wrong})

    def test_sizes_are_refused_before_anything_is_allocated(self, opts: Options) -> None:
        variant = self.declared()
        config = variant.make_config(opts)
        with _NoTensors():
            variant.check(self.dim, config)
            for dim in (0, -8, 2.5):
                with pytest.raises(ConfigError):
                    variant.check(dim, config)  # type: ignore[arg-type]

    # every option does something --------------------------------------------------------------------------------------

    def test_every_option_matters(self) -> None:
        """Another value of any option, in at least one of `options`, gives other parameters, outputs or states."""
        variant = self.declared()
        for field in dataclasses.fields(variant.config):
            for opts, other in self._others(variant, field):
                if self._fingerprint(opts) != self._fingerprint({**opts, field.name: other}):
                    break
            else:
                pytest.fail(
                    f"option {field.name!r} does nothing in any of `options`, or no other value is legal (set `values`)"
                )

    def test_every_choice_matters(self) -> None:
        """No two choices of an option are the same thing under two names."""
        variant = self.declared()
        hints = typing.get_type_hints(variant.config)
        for field in dataclasses.fields(variant.config):
            choices = _choices(hints[field.name])
            differ: set[tuple[Any, Any]] = set()
            for opts in self.options:
                legal = {
                    c: self._fingerprint({**opts, field.name: c}) for c in choices if self._legal(opts, field.name, c)
                }
                differ |= {(a, b) for a in legal for b in legal if legal[a] != legal[b]}
            same = [(a, b) for i, a in enumerate(choices) for b in choices[:i] if (a, b) not in differ]
            assert not same, f"choices of {field.name!r} that are the same in all of `options`: {same}"

    def _legal(self, opts: Options, name: str, value: Any) -> bool:
        variant = self.declared()
        try:
            config = variant.make_config({**opts, name: value})
            variant.check(self.dim, config)
            with torch.device("meta"):
                for index in range(variant.branches):
                    variant.branch(index)(self.dim, config, index)
        except ConfigError:
            return False
        return True

    def _others(self, variant: Variant, field: dataclasses.Field[Any]) -> Iterator[tuple[Options, Any]]:
        """(options, another value) for every legal neighbour of the field's value."""
        for opts in self.options:
            now = getattr(variant.make_config(opts), field.name)
            tries = [self.values[field.name]] if field.name in self.values else _neighbours(variant, field, now)
            yield from ((opts, v) for v in tries if v is not now and v != now and self._legal(opts, field.name, v))

    def _fingerprint(self, opts: Options) -> list[Any]:
        """Return all that an option can change: names, shapes and initial values of parameters, outputs and states."""
        result: list[Any] = []
        for branch in range(self.declared().branches):
            fresh = self.make(opts, branch, stir=False)
            result += [(n, tuple(t.shape), t.double().sum().item()) for n, t in fresh.state_dict().items()]
            mixer = self.make(opts, branch)
            for mode in (False, True):
                torch.manual_seed(4)  # of dropout
                with torch.no_grad():
                    y_BTD, end = mixer.train(mode)(self.input(5), None)
                result += [y_BTD.sum().item(), y_BTD.abs().sum().item()]
                result += [(n, tuple(v.shape), v.double().abs().sum().item()) for n, v in end.items()]
        return result


class _NoTensors(TorchDispatchMode):
    """Fails on any tensor operation."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called while sizes were checked")


def _widths(variant: Variant, config: Any, dim: int) -> Iterator[int]:
    """Widths that `config` allows, from `dim` up."""
    for width in (dim, 128, 256, 384, 512, 768, 1024, 1536):
        try:
            variant.check(width, config)
        except ConfigError:
            continue
        yield width


def _choices(expected: Any) -> list[Any]:
    """The values that a type lists: those of a Literal, both of a bool, None; also inside a union."""
    if get_origin(expected) is Literal:
        return list(get_args(expected))
    if get_origin(expected) in (typing.Union, types.UnionType):
        return [c for part in get_args(expected) for c in _choices(part)]
    listed: dict[Any, list[Any]] = {bool: [True, False], type(None): [None]}
    return listed.get(expected, [])


def _neighbours(variant: Variant, field: dataclasses.Field[Any], now: Any) -> list[Any]:
    """Other values an option could take, nearest first; those out of range are sorted out by the caller."""
    expected = typing.get_type_hints(variant.config)[field.name]
    tries = [c for c in _choices(expected) if c is not now and c != now]
    kinds = (expected, *get_args(expected))
    step = field.metadata.get("multiple_of", 1)
    number = now if isinstance(now, (int, float)) and not isinstance(now, bool) else 8 * step
    if int in kinds:
        tries += [int(v) for v in (number, number + step, number - step, number * 2, number // 2)]
    if float in kinds:
        tries += [float(v) for v in (number, number * 2, number / 2, number + 0.25, number - 0.25, number * 0.9)]
    return tries


def _wrong_values(variant: Variant, field: dataclasses.Field[Any]) -> list[Any]:
    """Values that an option must refuse: of another type, and just outside its bounds."""
    expected = typing.get_type_hints(variant.config)[field.name]
    limits = field.metadata
    wrong: list[Any] = [object(), {"a": 1}]
    accepts = (expected, *get_args(expected))
    if str not in accepts:
        wrong.append("no such choice")
    if float in accepts:
        wrong += [math.nan, math.inf, -math.inf]
    if int in accepts or float in accepts:
        beyond = {"ge": -1, "gt": 0, "le": 1, "lt": 0}
        wrong += [limits[bound] + step for bound, step in beyond.items() if bound in limits]
        if limits.get("multiple_of", 1) > 1:
            wrong.append(limits["multiple_of"] + 1)
    if int in accepts and float not in accepts:
        wrong.append(1.5)
    return wrong
