"""Compares two models: their losses step by step on the same batches, with an interval for the difference.

Two runs with the same seed and protocol read the same bytes at every step, so most of the noise in the losses is the same for
both and cancels in the difference. The interval of a pair reflects the remaining batch noise, not seed-to-seed variation; with
several seeds there is an interval over the seeds as well.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elman_bench.size import TOLERANCE
from elman_core.extension import ConfigError, wrapped

from .collect import chosen, collect, fault_of_metrics
from .curves import bits
from .identity import differences, effective_protocol, hash_of, identity, labels, named
from .rows import Group
from .runs import ENDED_WELL, Run, without_trials
from .statistics import FEWEST, LEVEL, Interval, bootstrap_mean, student_mean

SHARE = 0.25
"""The share of the common steps that is compared, at the end."""
LEAST = 200
"""Fewest steps to compare, if that is at most half of them."""

# Two runs read the same batches if these are equal.
BATCHES = ("data.size", "data.blake2b", "data.sampling", "data.heldout", "train.batch_size", "train.chunk_size")


@dataclass(frozen=True)
class Contender:
    """A model with its settings: runs that differ only in the seed."""

    name: str
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class SeedPair:
    """Two runs, step by step.

    Attributes:
        seeds: of both runs. paired: whether they read the same batches. steps: (first, last) that are compared.
        loss: its difference at these steps; None if there are too few steps. drift: the intervals of the first and second half
            of these steps if they do not overlap, which means that the difference is still changing.
        heldout: difference of held-out bits per byte, if both have it.
    """

    seeds: tuple[int | None, int | None]
    paired: bool
    steps: tuple[int, int]
    loss: Interval | None
    drift: tuple[Interval, Interval] | None
    heldout: float | None


@dataclass(frozen=True)
class Comparison:
    """Two contenders. Differences are first minus second, in bits per byte: below zero, the first is better.

    Attributes:
        pairs: one for each common seed. loss, heldout: over the seeds, if there are at least two.
        caveats: limits of the comparison.
    """

    first: Contender
    second: Contender
    pairs: tuple[SeedPair, ...]
    loss: Interval | None
    heldout: Interval | None
    caveats: tuple[str, ...]

    @property
    def decisive(self) -> Interval | None:
        """The interval behind the verdict: held out over seeds; else loss over seeds; else that of the first pair."""
        return self.heldout or self.loss or (self.pairs[0].loss if self.pairs else None)


def contenders(runs: Sequence[Run]) -> list[Contender]:
    """Groups runs of one protocol that differ only in the seed, with the best values of tuned settings. Leaves out runs without
    a step.
    """
    protocols: dict[str, list[Run]] = {}
    for run in runs:
        if run.manifest and len(run.metrics):
            protocols.setdefault(hash_of(effective_protocol(run)), []).append(run)
    groups: dict[tuple[str, ...], list[Run]] = {}
    for protocol, some in protocols.items():
        for run in chosen(some):
            groups.setdefault((*identity(run), protocol), []).append(run)
    names = labels([members[0] for members in groups.values()])
    return [
        Contender(n if names.count(n) == 1 else f"{n} ({m[0].path.name})", tuple(m))
        for n, m in zip(names, groups.values(), strict=True)
    ]


def against_first(runs: Sequence[Run], last: int | None = None) -> list[Comparison]:
    """The first contender with each other one. Raises `ConfigError` if fewer than two models have done a step."""
    found = contenders(runs)
    if len(found) < 2:
        raise ConfigError(
            "nothing to compare: give runs of at least two models or settings that have done a step"
            + (f"; found only {found[0].name}" if found else "")
        )
    return [compare(found[0], other, last) for other in found[1:]]


def against_best(runs: Sequence[Run], last: int | None = None) -> list[Comparison]:
    """For each protocol (and size of a suite), the model with the fewest bits per byte with each other one; without trials."""
    groups = collect(without_trials(runs), by_model=True, everything=False).groups
    return [compare(models[0], other, last) for models in map(ranked, groups) for other in models[1:]]


def ranked(group: Group) -> list[Contender]:
    """The models of a table by their runs that ended well, the best first."""
    return sorted(contenders([run for row in group.rows for run in row.runs if run.status in ENDED_WELL]), key=rank)


def rank(contender: Contender) -> float:
    """Mean held-out bits per byte; infinite if nothing is held out."""
    values = [(run.manifest.get("result") or {}).get("bits_per_byte") for run in by_seed(contender).values()]
    known = [v for v in values if isinstance(v, int | float)]
    return statistics.fmean(known) if known else math.inf


def compare(first: Contender, second: Contender, last: int | None = None) -> Comparison:
    """Pair two contenders seed by seed and step by step. Runs that did not end well count where no pair did, as in a table.

    Args:
        last: number of common steps to compare; by default the last quarter, or 200 if that is at most half of them.
    """
    mine, theirs = by_seed(first), by_seed(second)
    both = [(run, theirs[seed]) for seed, run in mine.items() if seed in theirs] or [(first.runs[0], second.runs[0])]
    both.sort(key=lambda pair: not _ended_well(pair))
    pairs = [_pair(one, two, last) for one, two in both]
    counted = pairs[: sum(map(_ended_well, both)) or None]
    losses = [p.loss.mean for p in counted if p.loss is not None]
    held = [p.heldout for p in counted if p.heldout is not None]
    return Comparison(
        first,
        second,
        tuple(pairs),
        student_mean(losses) if len(losses) > 1 else None,
        student_mean(held) if len(held) > 1 else None,
        tuple(_caveats(first, second, counted)),
    )


def _ended_well(pair: Sequence[Run]) -> bool:
    return all(run.status in ENDED_WELL for run in pair)


def by_seed(contender: Contender) -> dict[int | None, Run]:
    """One run per seed, since a repeated run is not a second sample; a run that ended well, if there is one."""
    found: dict[int | None, Run] = {}
    for run in contender.runs:
        if run.seed not in found or _place(run) < _place(found[run.seed]):
            found[run.seed] = run
    return found


def _place(run: Run) -> int:
    return (*ENDED_WELL, run.status).index(run.status)


def _pair(one: Run, two: Run, last: int | None) -> SeedPair:
    a, b = _bits_by_step(one), _bits_by_step(two)
    common = [int(step) for step in sorted(a.keys() & b.keys())]
    count = last or max(math.ceil(SHARE * len(common)), min(LEAST, math.ceil(len(common) / 2)))
    steps = common[-count:]
    bits_2N = np.array([[series[s] for s in steps] for series in (a, b)], dtype=np.float64)
    paired = same_batches(one, two)
    difference, drift = None, None
    if len(steps) >= FEWEST and np.isfinite(bits_2N).all():
        if paired:
            difference = bootstrap_mean(bits_2N[0] - bits_2N[1])
            drift = _drift(bits_2N[0] - bits_2N[1])
        else:
            difference = _independent(bits_2N)
    ends = [_heldout(run) for run in (one, two)]
    heldout = None if None in ends else ends[0] - ends[1]  # type: ignore[operator]
    return SeedPair(
        (one.seed, two.seed), paired, (steps[0], steps[-1]) if steps else (0, 0), difference, drift, heldout
    )


def _bits_by_step(run: Run) -> dict[float, float]:
    """The training losses that are known."""
    losses = zip(run.metrics.columns["step"], bits(run), strict=True)
    return {step: loss for step, loss in losses if not math.isnan(loss)}


def same_batches(one: Run, two: Run) -> bool:
    """Whether both read the same bytes at every step: the same seed, text and windows."""
    protocols = [named(run.manifest.get("protocol") or {}) for run in (one, two)]
    equal = all(p.get(k) == protocols[0].get(k) for p in protocols for k in BATCHES)
    equal &= len({p.get("data.documents") == "pack" for p in protocols}) == 1  # "reset" reads what "keep" reads
    return equal and all(protocols) and one.seed is not None and one.seed == two.seed


def _independent(bits_2N: NDArray[np.float64]) -> Interval:
    """The difference of two independent means: the variances add up."""
    a, b = bootstrap_mean(bits_2N[0]), bootstrap_mean(bits_2N[1])
    mean, reach = a.mean - b.mean, math.hypot(a.half_width, b.half_width)
    return Interval(mean, mean - reach, mean + reach, a.count, max(a.block, b.block))


def _drift(series_N: NDArray[np.float64]) -> tuple[Interval, Interval] | None:
    """The intervals of both halves, if they do not overlap."""
    half = len(series_N) // 2
    if half < FEWEST:
        return None
    early, late = bootstrap_mean(series_N[:half]), bootstrap_mean(series_N[half:])
    return (early, late) if early.high < late.low or late.high < early.low else None


def _heldout(run: Run) -> float | None:
    """Bits per byte of the last evaluation, if it was made at the last step."""
    evaluations, steps = run.metrics.evaluations, run.metrics.columns["step"]
    if not evaluations or "bits_per_byte" not in evaluations[-1] or evaluations[-1]["step"] != steps[-1]:
        return None
    return float(evaluations[-1]["bits_per_byte"])


def _in_minutes(first: Contender, second: Contender) -> bool:
    """Whether equal steps are not equal minutes, which were asked for."""
    return any(run.settings["train"].get("minutes") for run in (*first.runs, *second.runs))


def _caveats(first: Contender, second: Contender, pairs: Sequence[SeedPair]) -> list[str]:
    """Limits of a comparison."""
    runs, found = [*first.runs, *second.runs], []
    differ = differences([effective_protocol(run) for run in (first.runs[0], second.runs[0])])
    if differ:
        keys = ", ".join(sorted(differ))
        found.append(f"the protocols differ ({keys}), so the models alone do not explain the difference")
    elif _in_minutes(first, second):
        found.append(
            "the length was given in minutes: losses are compared at equal steps, where the learning rates differ; only "
            "held-out figures are after equal minutes"
        )
    if not pairs[0].paired:
        why = "no seed in common" if pairs[0].seeds[0] != pairs[0].seeds[1] else "texts or windows differ"
        found.append(
            f"{why}: the runs did not read the same batches, so they are compared as independent runs, far less precisely"
        )
    if len(pairs) == 1:
        one = "one seed" if pairs[0].seeds[0] == pairs[0].seeds[1] else "one run of each"
        found.append(f"{one}: the interval reflects batch noise, not seed-to-seed variation")
    elif len(pairs) == 2:
        found.append("two seeds: the interval over seeds comes from two numbers; run a third seed")
    if any(p.drift for p in pairs):
        found.append("the difference was still changing over the compared steps, so longer training may change it")
    for contender in (first, second):
        if len(by_seed(contender)) < len(contender.runs):
            found.append(f"{contender.name} has several runs of one seed; one of them is used")
    sizes = [run.manifest.get("parameters") or 0 for run in (first.runs[0], second.runs[0])]
    if all(sizes) and abs(sizes[0] / sizes[1] - 1) > TOLERANCE:
        found.append(f"the sizes differ: {sizes[0]:,} and {sizes[1]:,} parameters")
    hooks = {str(run.manifest.get("act_hooks") or {}) for run in runs}
    if len(hooks) > 1:
        found.append("hooks of different plugins changed the trainings")
    found += [f"{run.path.name}: {fault}" for run in runs if (fault := fault_of_metrics(run))]
    found += [f"{run.path.name} is {run.status}" for run in runs if not run.ok]
    return found


def verdict(comparison: Comparison) -> str:
    """One sentence: which model is better and by how much, or that they are equal within noise."""
    interval = comparison.decisive
    one, two = comparison.first.name, comparison.second.name
    if interval is None:
        return f"{one} and {two}: too few steps in common"
    basis = "training loss, one pair of runs"
    if comparison.heldout is not None:
        basis = f"held out, {interval.count} seeds"
    elif comparison.loss is not None:
        basis = f"training loss, {interval.count} seeds"
    where = " at equal steps" if comparison.heldout is None and _in_minutes(comparison.first, comparison.second) else ""
    percent = f"{100 * LEVEL:g} % interval"
    if not interval.clear:
        return (
            f"{one} and {two} are equal within noise{where}: {interval.mean:+.4f} bits per byte, {percent} "
            f"{interval.low:+.4f} to {interval.high:+.4f} ({basis})"
        )
    better, worse = (one, two) if interval.mean < 0 else (two, one)
    low, high = sorted((abs(interval.low), abs(interval.high)))
    by = f"{abs(interval.mean):.4f} bits per byte, {percent} {low:.4f} to {high:.4f} ({basis})"
    return f"{better} is better than {worse}{where} by {by}"


def describe(comparison: Comparison, width: int | None = None) -> str:
    """The verdict, then a line for each pair and each caveat, broken between words for a terminal of `width` columns."""
    lines = [verdict(comparison)]
    for pair in comparison.pairs:
        seed = f"seed {pair.seeds[0]}" if pair.seeds[0] == pair.seeds[1] else "seeds {} and {}".format(*pair.seeds)
        parts = [f"  {seed}, steps {pair.steps[0]:,} to {pair.steps[1]:,}:"]
        if pair.loss is None:
            parts.append(f"fewer than {FEWEST} steps in common")
        else:
            d = pair.loss
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
    return "\n".join(wrapped(line, width) for line in [*lines, *(f"  note: {text}" for text in comparison.caveats)])


def as_data(comparison: Comparison) -> dict[str, Any]:
    """Plain values, for JSON."""
    return {
        "first": comparison.first.name,
        "second": comparison.second.name,
        "verdict": verdict(comparison),
        "loss_over_seeds": comparison.loss and asdict(comparison.loss),
        "heldout_over_seeds": comparison.heldout and asdict(comparison.heldout),
        "pairs": [asdict(pair) for pair in comparison.pairs],
        "caveats": list(comparison.caveats),
        "unit": "bits per byte, first minus second",
    }
