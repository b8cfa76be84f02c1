"""Finds the width or depth of a model with a given number of parameters, counted exactly on the meta device.

`Variant.check` decides which widths a variant allows. Importing this module does not import torch; counting does.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elman_core.extension import ConfigError, count

if TYPE_CHECKING:
    from elman_core.extension import Resolved

ALIGN = 128
FINEST = 8
"""Widths are multiples of 8, which the fast paths of matrix products need."""
TOLERANCE = 0.02
"""Relative difference in parameters up to which models count as equal in size."""
_WIDEST = 1 << 17
_DEEPEST = 1 << 12
_GRID_DEPTH = 64


@dataclass(frozen=True)
class Size:
    """A candidate: width D, depth in layers, exact number of parameters (a tied head counts once)."""

    width: int
    depth: int
    parameters: int
    off: float
    """(parameters - target) / target."""

    @property
    def fits(self) -> bool:
        """Whether it counts as equal to the target."""
        return abs(self.off) <= TOLERANCE

    @property
    def aligned(self) -> int:
        """The largest power of two, 128 at most, that divides the width."""
        return min(ALIGN, self.width & -self.width)


def parse_parameters(text: str) -> int:
    """ "100M" is 100,000,000; "1.3B", "64k" and "480_000" are read too. Raises `ConfigError` for anything else."""
    scales = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9}
    digits = text.strip().replace("_", "").replace(",", "")
    scale = scales.get(digits[-1:].lower(), 1)
    try:
        value = float(digits[:-1] if scale != 1 else digits) * scale
    except ValueError:
        value = -1
    if not 1 <= value < 1e15:
        raise ConfigError(f"write a number of parameters as 100M, 1.3B or 480_000, not {text!r}")
    return round(value)


def candidates(
    variant: str,
    options: Mapping[str, Any] | None,
    parameters: int,
    *,
    depth: int | None = None,
    width: int | None = None,
    multiple: int = ALIGN,
    **backbone: Any,
) -> list[Size]:
    """Sizes near `parameters`, each counted exactly, the nearest first.

    With `depth`: the widths around the target among the multiples of `multiple`, and of its halves down to 8 until one is
    within 2 %. With `width`: the depths around the target. With neither: every multiple of `multiple` that comes within 2 %
    at some depth up to 64, the widest first.

    Args:
        variant: name, name:preset or a pattern such as "a*3+b", of which depths are multiples. options: of the variant, which
            override the preset's; of a pattern {variant: its options}. backbone: further fields of `LadderConfig`.

    Raises:
        ConfigError: both `depth` and `width` are given, the variant refuses the width, or no size is near the target.
    """
    from elman_core.extension import resolve_pattern  # imports torch, which a table of results does not need

    target = _Target(variant, resolve_pattern(variant, options), parameters, backbone)
    if depth is not None and width is not None:
        raise ConfigError("give a depth or a width, not both: the other one is computed")
    if depth is not None:
        if not 1 <= depth <= _DEEPEST:
            raise ConfigError(f"a depth is a number of layers from 1 to {_DEEPEST:,}, not {depth:,}")
        return target.widths(depth, multiple)
    if width is not None:
        return target.depths(width)
    return target.grid(multiple)


def solve_width(
    variant: str,
    options: Mapping[str, Any] | None,
    parameters: int,
    depth: int,
    multiple: int = ALIGN,
    **backbone: Any,
) -> int:
    """The width at which `variant` has `parameters` within 2 %: a multiple of `multiple`, or else of its half, quarter, ….

    Raises:
        ConfigError: there is none; names the nearest width, and a size of another depth that fits.
    """
    sizes = candidates(variant, options, parameters, depth=depth, multiple=multiple, **backbone)
    if not sizes[0].fits:
        raise ConfigError(nothing_fits(variant, options, parameters, sizes, multiple, **backbone))
    return sizes[0].width


def nothing_fits(
    variant: str,
    options: Mapping[str, Any] | None,
    parameters: int,
    sizes: Sequence[Size],
    multiple: int = ALIGN,
    **backbone: Any,
) -> str:
    """The line that says that none of `sizes`, nearest first, is within 2 %, and which size is."""
    best = sizes[0]
    line = (
        f"{variant} comes no closer to {parameters:,} parameters than {best.width}x{best.depth} with {best.parameters:,} "
        f"({100 * best.off:+.1f} %); equal means within 2 %"
    )
    try:
        others = candidates(variant, options, parameters, multiple=multiple, **backbone)
    except ConfigError:
        return f"{line}: give other parameters or another depth, or take {variant}@{best.width}x{best.depth} as it is"
    near = min(others, key=lambda s: (abs(s.depth - best.depth), abs(s.off)))
    return f"{line}. {near.width}x{near.depth} has {near.parameters:,} ({100 * near.off:+.1f} %)"


class _Target:
    """Sizes of one variant or pattern near one number of parameters.

    The search counts a model with its layers once and twice and assumes that further ones are like the second; the sizes that
    it finds are then counted exactly.
    """

    def __init__(self, name: str, layers: Sequence[Resolved], parameters: int, backbone: Mapping[str, Any]) -> None:
        self.name, self.layers, self.parameters, self.backbone = name, layers, parameters, backbone
        self.period = len(layers)
        self.parts = functools.cache(self._parts)

    def widths(self, depth: int, multiple: int) -> list[Size]:
        sizes: dict[int, Size] = {}
        step, low, high = multiple, 1, _WIDEST
        while True:
            allowed = self._allowed(step, low, high)
            at = bisect.bisect_left(allowed, self.parameters, key=lambda width: self._estimate(width, depth))
            for width in allowed[max(0, at - 1) : at + 1]:
                sizes[width] = sizes.get(width) or self._size(width, depth)
            if any(s.fits for s in sizes.values()) or step % 2 or step // 2 < min(FINEST, multiple):
                return self._sorted(sizes.values(), f"no width of {self.name!r} at depth {depth}")
            step //= 2
            low, high = allowed[at - 1] if at else low, allowed[at] if at < len(allowed) else high

    def depths(self, width: int) -> list[Size]:
        one, more = self.parts(width)
        middle = max(1, (self.parameters - one) // more + 1) * self.period
        if middle >= _DEEPEST:
            raise ConfigError(
                f"{self.name!r} at width {width} needs over {_DEEPEST} layers for {self.parameters:,} parameters"
            )
        sizes = (self._size(width, depth) for depth in (middle, middle + self.period))
        return self._sorted(sizes, f"no depth of {self.name!r} at width {width}")

    def grid(self, multiple: int) -> list[Size]:
        sizes = []
        for width in self._allowed(multiple):
            one, more = self.parts(width)
            if one > (1 + TOLERANCE) * self.parameters:
                break
            depth = max(1, round((self.parameters - one) / more) + 1) * self.period
            if depth <= _GRID_DEPTH and abs(self._estimate(width, depth) / self.parameters - 1) <= TOLERANCE:
                sizes.append(self._size(width, depth))
        if not sizes:
            raise ConfigError(
                f"no width of {self.name!r} that is a multiple of {multiple} gives {self.parameters:,} parameters "
                f"within 2 % at a depth up to {_GRID_DEPTH}: give --depth to try finer widths"
            )
        return sizes[::-1]

    def _parts(self, width: int) -> tuple[int, int]:
        """Parameters of a model with the layers once, and of the layers once more."""
        one, two = (count(self.layers, width, n * self.period, **self.backbone) for n in (1, 2))
        return one, two - one

    def _estimate(self, width: int, depth: int) -> int:
        one, more = self.parts(width)
        return one + (depth // self.period - 1) * more

    def _size(self, width: int, depth: int) -> Size:
        exact = count(self.layers, width, depth, **self.backbone)
        return Size(width, depth, exact, (exact - self.parameters) / self.parameters)

    def _allowed(self, step: int, low: int = 1, high: int = _WIDEST) -> list[int]:
        """Every multiple of `step` from `low` to `high` that the variant allows as a width."""
        return [width for width in range(-(-low // step) * step, high + 1, step) if self._allows(width)]

    def _allows(self, width: int) -> bool:
        try:
            for layer in self.layers:
                layer.variant.check(width, layer.config)
        except ConfigError:
            return False
        return True

    def _sorted(self, sizes: Iterable[Size], nothing: str) -> list[Size]:
        ordered = sorted(sizes, key=lambda size: abs(size.off))
        if not ordered:
            raise ConfigError(f"{nothing} comes near {self.parameters:,} parameters")
        return ordered
