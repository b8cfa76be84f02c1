"""The width or depth that gives a model a number of parameters, counted on the meta device: exact, and nothing is allocated."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from elman_core.model import LadderConfig, LadderForCausalLM
from elman_core.registry import ConfigError, Resolved

ALIGN = 128
TOLERANCE = 0.02
"""Two models of equal size differ by no more than this."""
_WIDEST = 1 << 17


@dataclass(frozen=True)
class Size:
    """A candidate: width D, depth in layers, exact number of parameters (the tied head counts once)."""

    width: int
    depth: int
    parameters: int
    off: float
    """(parameters - target) / target."""


def count(found: Resolved, width: int, depth: int) -> int:
    """Parameters of the whole model, by building it on the meta device.

    Raises:
        ConfigError: the variant cannot be built at this width.
    """
    found.variant.check(width, found.config)
    config = LadderConfig(variant=found.variant.name, options=found.options, hidden_size=width, num_hidden_layers=depth)
    with torch.device("meta"):
        model = LadderForCausalLM(config)
    return sum(p.numel() for p in model.parameters())


class _Counter:
    """Counts by building one and two layers of a width: every layer is the same."""

    def __init__(self, found: Resolved) -> None:
        self.found = found
        self.parts = functools.cache(self._parts)

    def _parts(self, width: int) -> tuple[int, int]:
        one, two = (count(self.found, width, depth) for depth in (1, 2))
        return one, two - one

    def __call__(self, width: int, depth: int) -> int:
        one, layer = self.parts(width)
        return one + (depth - 1) * layer


def solve_width(found: Resolved, target: int, depth: int) -> list[Size]:
    """Candidates at this depth, the nearest first: the two multiples of 128 around the target, and finer ones if neither is
    within 2 %.

    Raises:
        ConfigError: no width that the variant allows comes near.
    """
    total = _Counter(found)
    sizes: dict[int, Size] = {}
    for align in (ALIGN, 64, 32, 16, 8):
        for width in _around(found, total, target, depth, align):
            parameters = total(width, depth)
            sizes[width] = Size(width, depth, parameters, parameters / target - 1)
        if any(abs(s.off) <= TOLERANCE for s in sizes.values()):
            break
    if not sizes:
        raise ConfigError(f"no width of {found.name!r} at depth {depth} comes near {target:,} parameters")
    best = sorted(sizes.values(), key=lambda s: abs(s.off))
    for size in best[:1]:
        exact = count(found, size.width, size.depth)
        assert exact == size.parameters, f"counted {size.parameters}, built {exact}"
    return best


def solve_depth(found: Resolved, target: int, width: int) -> list[Size]:
    """Candidates at this width, the nearest first: the two depths around the target.

    Raises:
        ConfigError: the variant cannot be built at this width.
    """
    one, layer = _Counter(found).parts(width)
    below = max(1, (target - one) // layer + 1)
    sizes = [Size(width, d, (p := one + (d - 1) * layer), p / target - 1) for d in (below, below + 1)]
    return sorted(sizes, key=lambda s: abs(s.off))


def _around(found: Resolved, total: Any, target: int, depth: int, align: int) -> Iterator[int]:
    """The widths below and above the target among the multiples of `align` that the variant allows."""

    def allowed(width: int) -> bool:
        try:
            found.variant.check(width, found.config)
        except ConfigError:
            return False
        return True

    low, high = 0, align
    while high <= _WIDEST and not (allowed(high) and total(high, depth) >= target):
        low, high = high, 2 * high
    while high - low > align:
        middle = (low + high) // 2 // align * align
        nearest = next((w for w in range(middle, high, align) if allowed(w)), high)
        if nearest < high and total(nearest, depth) >= target:
            high = nearest
        elif nearest < high:
            low = nearest
        else:
            high = middle
    yield from (w for w in (low, high) if w and w <= _WIDEST and allowed(w))
