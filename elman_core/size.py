"""The number of parameters of a model, counted exactly on the meta device. Importing this module does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

from elman_core.registry import ConfigError, Resolved
from elman_core.registry.installing import moved

_BACKBONE = {"vocab_size": 256, "tie_word_embeddings": True, "mlp_ratio": 0.0, "made_with": None}


def count(layers: Resolved | Sequence[Resolved], width: int, depth: int, **backbone: Any) -> int:
    """Number of parameters of the whole model, built on the meta device.

    Args:
        layers: a variant, or the layers of a pattern, which repeat up to the depth.
        backbone: further fields of `LadderConfig`, such as tie_word_embeddings and mlp_ratio.

    Raises:
        ConfigError: a variant cannot be built at this width, or the depth is no multiple of the number of layers.
    """
    import torch

    from elman_core.nn.layers import build_mixers

    several = [layers] if isinstance(layers, Resolved) else layers
    if depth % (period := len(several)):
        raise ConfigError(f"the depth must be a multiple of the pattern's {period} layers, not {depth}")
    for layer in several:
        layer.variant.check(width, layer.config)
    pairs = [(layer.variant.name, layer.options) for layer in several] * (depth // period)
    variant, options = pairs[0] if period == 1 else map(list, zip(*pairs, strict=True))
    config = {"variant": variant, "options": options, "hidden_size": width, "num_hidden_layers": depth}
    model = SimpleNamespace(**_BACKBONE | config | backbone)
    with torch.device("meta"):
        mixers = [mixer for mixer, _ in build_mixers(model)]
    embeddings = model.vocab_size * (1 if model.tie_word_embeddings else 2)
    norms = len(mixers) + 1
    return sum(p.numel() for mixer in mixers for p in mixer.parameters()) + (embeddings + norms) * model.hidden_size


def __getattr__(name: str) -> NoReturn:
    if name in ("Size", "TOLERANCE", "candidates", "parse_parameters", "solve_width"):
        raise ImportError(moved(f"{__name__}.{name}", "size", f"size.{name}"))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
