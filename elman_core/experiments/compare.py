"""Two models side by side: their losses step by step on the same batches, and what may honestly be said of the difference.

Two runs with one seed and one protocol read the same bytes at every step, so most of what makes a loss go up and down is the
same for both and drops out of the difference. The interval of a pair covers what is left of that: which bytes came at the end
of the training. It knows nothing of other seeds: that is what the interval over seeds is for, once there are several.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elman_core.registry import ConfigError

from .names import identity, labels
from .notes import TOLERANCE
from .protocols import differences, effective_protocol, named
from .results import chosen, collect
from .runs import Run, without_trials
from .statistics import FEWEST, Interval, bootstrap_mean, student_mean

SHARE = 0.25
"""Of the common steps, the last part that is compared."""
LEAST = 200
"""Steps compared, if these are not more than half."""

# Without these equal, two runs do not read the same batches.
BATCHES = ("data.size", "data.blake2b", "data.sampling", "data.heldout", "train.batch_size", "train.chunk_size")


@dataclass(frozen=True)
class Contender:
    """A model with its settings: the runs that differ in the seed alone."""

    name: str
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class SeedPair:
    """Two runs, step by step.

    Attributes:
        seeds: of the first and of the second. paired: whether they read the same batches.
        steps: (first, last) compared. difference: of the losses there; None if the steps are too few.
        drift: intervals of the first and second half of these steps, if they do not overlap: the difference is still changing.
        heldout: difference of held-out bits per byte, where both have it.
    """

    seeds: tuple[int | None, int | None]
    paired: bool
    steps: tuple[int, int]
    difference: Interval | None
    drift: tuple[Interval, Interval] | None
    heldout: float | None


@dataclass(frozen=True)
class Comparison:
    """What is known of one contender beside another. Differences are first minus second, in bits per byte: below zero, the
    first is better.

    Attributes:
        pairs: one for each seed that both have. loss, heldout: over the seeds, if there are two at least.
        caveats: why this is less than it seems.
    """

    first: Contender
    second: Contender
    pairs: tuple[SeedPair, ...]
    loss: Interval | None
    heldout: Interval | None
    caveats: tuple[str, ...]

    @property
    def decisive(self) -> Interval | None:
        """The interval that the verdict rests on: held out over seeds; else the loss over seeds; else the one pair's."""
        if self.heldout is not None:
            return self.heldout
        if self.loss is not None:
            return self.loss
        return self.pairs[0].difference if self.pairs else None


def contenders(runs: Sequence[Run]) -> list[Contender]:
    """Runs that differ in the seed alone, put together; of a suite's tuned settings, the values that were best.

    Runs without a step are left out.
    """
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in chosen([run for run in runs if run.manifest]):
        if len(run.metrics):
            groups.setdefault(identity(run), []).append(run)
    names = labels([members[0] for members in groups.values()])
    return [Contender(n, tuple(m)) for n, m in zip(names, groups.values(), strict=True)]


def against_first(runs: Sequence[Run], last: int | None = None) -> list[Comparison]:
    """The first contender beside each other one.

    Raises:
        ConfigError: fewer than two models with steps.
    """
    found = contenders(runs)
    if len(found) < 2:
        raise ConfigError(
            "there is nothing to compare: give runs of at least two models or settings that have done a step"
            + (f"; found only {found[0].name}" if found else "")
        )
    return [compare(found[0], other, last) for other in found[1:]]


def against_best(runs: Sequence[Run], last: int | None = None) -> list[Comparison]:
    """In each protocol (and size, if a suite has several): the model with the fewest bits per byte beside each other one.

    Without the trials that chose what the others were given, if there are others.
    """
    comparisons = []
    for group in collect(without_trials(runs), by_model=True, everything=False).groups:
        members = contenders([run for row in group.rows for run in row.runs if row.status in ("ok", "contended")])
        members.sort(key=rank)
        comparisons += [compare(members[0], other, last) for other in members[1:]]
    return comparisons


def rank(contender: Contender) -> float:
    """Mean of the held-out bits per byte; infinite where nothing is held out."""
    values = [(run.manifest.get("result") or {}).get("bits_per_byte") for run in contender.runs]
    known = [v for v in values if isinstance(v, int | float)]
    return statistics.fmean(known) if known else math.inf


def compare(first: Contender, second: Contender, last: int | None = None) -> Comparison:
    """Pair two contenders seed by seed and step by step.

    Args:
        last: steps compared, up to the last that both did; None: a quarter of them, or 200 if that is no more than half.
    """
    mine, theirs = _by_seed(first), _by_seed(second)
    both = [(run, theirs[seed]) for seed, run in mine.items() if seed in theirs]
    pairs = [_pair(one, two, last) for one, two in both or [(first.runs[0], second.runs[0])]]
    losses = [p.difference.mean for p in pairs if p.difference is not None]
    held = [p.heldout for p in pairs if p.heldout is not None]
    return Comparison(
        first,
        second,
        tuple(pairs),
        student_mean(losses) if len(losses) > 1 else None,
        student_mean(held) if len(held) > 1 else None,
        tuple(_caveats(first, second, pairs)),
    )


def _by_seed(contender: Contender) -> dict[int | None, Run]:
    """One run a seed: a run done twice is no second draw. One that ended well, if there is one."""
    found: dict[int | None, Run] = {}
    for run in contender.runs:
        if run.seed not in found or (run.ok and not found[run.seed].ok):
            found[run.seed] = run
    return found


def _pair(one: Run, two: Run, last: int | None) -> SeedPair:
    a, b = (dict(zip(r.metrics.column("step"), r.metrics.column("loss"), strict=True)) for r in (one, two))
    common = [int(step) for step in sorted(a.keys() & b.keys())]
    count = last or max(math.ceil(SHARE * len(common)), min(LEAST, math.ceil(len(common) / 2)))
    steps = common[-count:]
    bits_2N = np.array([[losses[s] for s in steps] for losses in (a, b)], dtype=np.float64) / math.log(2)
    paired = same_batches(one, two)
    difference, drift = None, None
    if len(steps) >= FEWEST and np.isfinite(bits_2N).all():
        difference = bootstrap_mean(bits_2N[0] - bits_2N[1]) if paired else _independent(bits_2N)
        drift = _drift(bits_2N[0] - bits_2N[1]) if paired else None
    ends = [_heldout(run) for run in (one, two)]
    heldout = None if None in ends else ends[0] - ends[1]  # type: ignore[operator]
    return SeedPair(
        (one.seed, two.seed), paired, (steps[0], steps[-1]) if steps else (0, 0), difference, drift, heldout
    )


def same_batches(one: Run, two: Run) -> bool:
    """Whether both read the same bytes at every step: one seed, one text, and the same cutting of it into windows."""
    protocols = [named(run.manifest.get("protocol") or {}) for run in (one, two)]
    equal = all(p.get(k) == protocols[0].get(k) for p in protocols for k in BATCHES)
    return equal and all(protocols) and one.seed is not None and one.seed == two.seed


def _independent(bits_2N: NDArray[np.float64]) -> Interval:
    """The difference of two means whose steps have nothing in common: the variances add up."""
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
    """The last evaluation, if it was made where the run ended."""
    evaluations, steps = run.metrics.evaluations, run.metrics.column("step")
    if not evaluations or "bits_per_byte" not in evaluations[-1] or evaluations[-1]["step"] != steps[-1]:
        return None
    return float(evaluations[-1]["bits_per_byte"])


def _caveats(first: Contender, second: Contender, pairs: Sequence[SeedPair]) -> list[str]:
    """Why a comparison says less than its figures seem to."""
    runs, found = [*first.runs, *second.runs], []
    differ = differences([effective_protocol(run) for run in (first.runs[0], second.runs[0])])
    if differ:
        keys = ", ".join(sorted(differ))
        found.append(f"not the same protocol ({keys}): the difference is that of the whole set-ups, not of the models")
    elif any(run.settings["train"].get("minutes") for run in runs):
        found.append(
            "minutes decided the length: losses are compared at equal steps, where the faster run's schedule is less far"
        )
    if not pairs[0].paired:
        why = "no seed in common" if pairs[0].seeds[0] != pairs[0].seeds[1] else "texts or windows differ"
        found.append(
            f"{why}: the runs did not read the same batches and are compared as independent, which is far less precise"
        )
    elif len(pairs) == 1:
        found.append("one seed: the interval says how sure this pair's difference is, not what another seed would give")
    elif len(pairs) == 2:
        found.append("two seeds: the interval over them rests on a single difference between two numbers; run a third")
    if any(p.drift for p in pairs):
        found.append("the difference was still changing over the steps compared: a longer training may end otherwise")
    for contender in (first, second):
        if len(_by_seed(contender)) < len(contender.runs):
            found.append(f"{contender.name} has several runs of one seed; one of them was taken")
    sizes = [run.manifest.get("parameters") or 0 for run in (first.runs[0], second.runs[0])]
    if all(sizes) and abs(sizes[0] / sizes[1] - 1) > TOLERANCE:
        found.append(f"not of equal size: {sizes[0]:,} and {sizes[1]:,} parameters")
    hooks = {str(run.manifest.get("act_hooks") or {}) for run in runs}
    if len(hooks) > 1:
        found.append("not the same hooks acted on the trainings")
    found += [f"{run.path.name} is {run.status}" for run in runs if not run.ok]
    return found
