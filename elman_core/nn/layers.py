"""From a config to the variant, options and mixers of every layer."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from elman_core.registry import ConfigError, ElmanError, Mixer, PluginError, Resolved, resolve
from elman_core.registry.checks import one_line, ran_out

from .swiglu import SwiGLU, SwiGLUConfig

log = logging.getLogger("elman_core")
MLP_MULTIPLE = 64  # the width of a ladder's SwiGLU is rounded up to a multiple of it


def resolve_layers(config: Any) -> list[Resolved]:
    """The variant and full options of each layer.

    Raises:
        ConfigError: no variant, a list of the wrong length, or options that a variant does not have.
        PluginError: a variant that is not installed; names the package that the checkpoint was made with.
    """
    depth = config.num_hidden_layers
    if config.variant is None or config.variant == []:
        raise ConfigError("a ladder needs a variant: LadderConfig(variant=…); `elman list` names those installed")
    names: Any = config.variant
    if isinstance(names, str) and "+" in names:
        names = _pattern(names)
        if depth % len(names):
            raise ConfigError(
                f"{config.variant} is a pattern of {len(names)} layers: the depth must be a multiple of it, not {depth}"
            )
        names *= depth // len(names)
    if not isinstance(names, list):
        if isinstance(config.options, list):
            raise ConfigError("options is a list, so variant must be a list of names, one for each layer")
        return [_resolve(config, names, config.options)] * depth
    if len(names) != depth:
        raise ConfigError(
            f"variant is a list of {len(names)}, but there are {depth} layers: give one name for each layer, or one for all"
        )
    options = config.options
    if options is None:
        options = [None] * depth
    elif isinstance(options, Mapping):
        known = list(dict.fromkeys(key for name in names for key in _keys(name)))
        if strange := [key for key in options if key not in known]:
            raise ConfigError(
                f"options are for {strange[0]!r}, which this model does not have; write {{variant: its options}} for "
                f"{' or '.join(known)}"
            )
        options = [next((options[key] for key in _keys(name) if key in options), None) for name in names]
    elif not isinstance(options, list) or len(options) != depth:
        what = f"a list of {len(options)}" if isinstance(options, list) else f"a {type(options).__name__}"
        raise ConfigError(f"options must be {{variant: its options}} or a list of {depth} dicts or None, not {what}")
    return [_resolve(config, name, given) for name, given in zip(names, options, strict=True)]


def resolve_pattern(variant: str, options: Any = None) -> list[Resolved]:
    """The layers that repeat in a model of `variant`: of a name one, of "a*3+b" four. Raises as `resolve_layers`."""
    period = len(_pattern(variant)) if "+" in variant else 1
    sizes = {"hidden_size": 1, "num_hidden_layers": period, "vocab_size": 1}
    return resolve_layers(SimpleNamespace(variant=variant, options=options, made_with=None, **sizes))


def _keys(name: Any) -> tuple[str, str]:
    """Return the keys of a layer's options: its name with and without the preset."""
    return str(name), str(name).partition(":")[0]


def _pattern(text: str) -> list[str]:
    """The variant of each layer that repeats: "a*3+b" is three layers of a and one of b."""
    names: list[str] = []
    for part in text.split("+"):
        name, star, count = part.strip().partition("*")
        if not name or (star and not re.fullmatch("[1-9][0-9]{0,3}", count)):
            raise ConfigError(f"write layers as NAME*COUNT+NAME, such as a*3+b, not {text!r}")
        names += [name] * int(count or 1)
    return names


def _resolve(config: Any, name: Any, options: Any) -> Resolved:
    if not isinstance(name, str | int) or isinstance(name, bool):
        raise ConfigError(f"a variant must be a name, not {name!r}")
    if options is not None and not isinstance(options, Mapping):
        raise ConfigError(f"the options of variant {name!r} must be a dict, not {options!r}")
    made_with = (config.made_with or {}).get(str(name).partition(":")[0])
    try:
        resolved = resolve(name, options, made_with=made_with)
    except ConfigError as error:
        if made_with is None:
            raise
        raise ConfigError(f"{error} (the checkpoint was made with {made_with})") from error
    # transformers keeps other keywords as attributes that nothing reads. Checkpoints are not checked: those that have one load.
    own = getattr(type(config), "__dataclass_fields__", vars(config))
    strays = [key for key in vars(config) if key in resolved.options and key not in own]
    if made_with is None and strays:
        raise ConfigError(f"{strays[0]} is an option of {name}: write LadderConfig(options={{{strays[0]!r}: …}})")
    return resolved


def expand(config: Any) -> list[Resolved]:
    """Resolve the layers and write the result into `config`: names, every option, and the package versions.

    A checkpoint from another version of a plugin is accepted if its options are, with one message.
    """
    layers = resolve_layers(config)
    before = config.made_with or {}
    made_with = {layer.variant.name: layer.installed.requirement for layer in layers}
    for name, requirement in made_with.items():
        if before.get(name, requirement) != requirement:
            log.warning("elman: this model was made with %s; %s accepts its options", before[name], requirement)
    if isinstance(config.variant, list) or "+" in str(config.variant):
        config.variant = [layer.variant.name for layer in layers]
        config.options = [dict(layer.options) for layer in layers]
    else:
        config.variant = layers[0].variant.name
        config.options = dict(layers[0].options)
    config.made_with = made_with
    return layers


def branches(config: Any) -> Iterator[tuple[type[Mixer], Any, bool]]:
    """For every residual branch, in order: the mixer's class, its options, and whether it is its layer's last branch.

    With `mlp_ratio`, a SwiGLU is the last branch of every layer.

    Raises:
        ConfigError: as `resolve_layers`, or a ratio out of range.
    """
    if not 0 <= config.mlp_ratio <= 16:
        raise ConfigError(f"mlp_ratio must be from 0 (no MLP) to 16, not {config.mlp_ratio}")
    mlp = SwiGLUConfig(config.mlp_ratio, MLP_MULTIPLE) if config.mlp_ratio else None
    for layer in resolve_layers(config):
        for index in range(layer.variant.branches):
            yield layer.variant.branch(index), layer.config, mlp is None and index == layer.variant.branches - 1
        if mlp is not None:
            yield SwiGLU, mlp, True


def build_mixers(config: Any) -> Iterator[tuple[Mixer, bool]]:
    """Expand `config` and build the mixer of every residual branch, in order, with whether it is its layer's last.

    Every layer is checked against the width before anything is allocated.
    """
    checked: set[int] = set()
    for layer in expand(config):
        if id(layer) not in checked:
            with _blamed(layer.variant.branch(0)):
                layer.variant.check(config.hidden_size, layer.config)
            checked.add(id(layer))
    for index, (mixer, options, last) in enumerate(branches(config)):
        with _blamed(mixer):
            made = mixer(config.hidden_size, options, index)
        yield made, last


@contextlib.contextmanager
def _blamed(mixer: type) -> Iterator[None]:
    """An exception in a plugin's mixer becomes a `PluginError` that names it; our own errors and memory errors stay."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, ElmanError) or ran_out(error):
            raise
        whose = f"{mixer.__name__} of {mixer.__module__.partition('.')[0]}"
        raise PluginError(f"{whose} cannot be built: {one_line(error)}") from error
