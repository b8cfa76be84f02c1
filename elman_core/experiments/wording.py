"""A comparison in words and as plain values: what may honestly be said of a difference."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from .compare import Comparison
from .statistics import FEWEST, Interval


def verdict(comparison: Comparison) -> str:
    """One sentence: which is better and by how much, or that the noise is larger."""
    interval = comparison.decisive
    one, two = comparison.first.name, comparison.second.name
    if interval is None:
        return f"{one} and {two}: too few steps in common to say anything"
    basis = (
        f"held out, {interval.count} seeds" if comparison.heldout is not None
        else f"training loss, {interval.count} seeds" if comparison.loss is not None
        else "training loss, one pair"
    )  # fmt: skip
    percent = f"{100 * interval.level:g} % interval"
    if not interval.clear:
        return (
            f"{one} and {two} are equal within noise: {interval.mean:+.4f} bits per byte, {percent} {interval.low:+.4f} to "
            f"{interval.high:+.4f} ({basis})"
        )
    better, worse = (one, two) if interval.mean < 0 else (two, one)
    low, high = sorted((abs(interval.low), abs(interval.high)))
    by = f"{abs(interval.mean):.4f} bits per byte, {percent} {low:.4f} to {high:.4f} ({basis})"
    return f"{better} is better than {worse} by {by}"


def describe(comparison: Comparison) -> str:
    """The verdict, then each pair and each caveat on a line."""
    lines = [verdict(comparison)]
    for pair in comparison.pairs:
        seed = f"seed {pair.seeds[0]}" if pair.seeds[0] == pair.seeds[1] else "seeds {} and {}".format(*pair.seeds)
        parts = [f"  {seed}, steps {pair.steps[0]:,} to {pair.steps[1]:,}:"]
        if pair.difference is None:
            parts.append(f"fewer than {FEWEST} steps in common")
        else:
            d = pair.difference
            parts.append(f"loss {d.mean:+.4f} [{d.low:+.4f}, {d.high:+.4f}], blocks of {d.block:.0f} steps")
        if pair.heldout is not None:
            parts.append(f"· held out {pair.heldout:+.4f}")
        if pair.drift is not None:
            parts.append("· {:+.4f} in the first half, {:+.4f} in the second".format(*(i.mean for i in pair.drift)))
        lines.append(" ".join(parts))
    for name, interval in (("loss", comparison.loss), ("held out", comparison.heldout)):
        if interval is not None:
            lines.append(
                f"  over {interval.count} seeds: {name} {interval.mean:+.4f} [{interval.low:+.4f}, {interval.high:+.4f}]"
            )
    return "\n".join([*lines, *(f"  note: {text}" for text in comparison.caveats)])


def as_data(comparison: Comparison) -> dict[str, Any]:
    """Plain values, for JSON."""

    def interval(i: Interval | None) -> dict[str, float] | None:
        return None if i is None else asdict(i)

    return {
        "first": comparison.first.name,
        "second": comparison.second.name,
        "verdict": verdict(comparison),
        "loss_over_seeds": interval(comparison.loss),
        "heldout_over_seeds": interval(comparison.heldout),
        "pairs": [
            {"seeds": list(p.seeds), "paired": p.paired, "steps": list(p.steps), "loss": interval(p.difference),
             "drift": None if p.drift is None else [asdict(i) for i in p.drift], "heldout": p.heldout}
            for p in comparison.pairs
        ],
        "caveats": list(comparison.caveats),
        "unit": "bits per byte, first minus second",
    }  # fmt: skip
