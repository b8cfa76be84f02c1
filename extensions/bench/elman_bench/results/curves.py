"""The series of a run that pictures show, smoothed, and thinned to what a picture can show. Needs numpy alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .runs import Run

Series = NDArray[np.float64]
SHARE = 0.02
"""The share of a run's steps over which a line is smoothed."""


@dataclass(frozen=True)
class Curve:
    """The measurements of a run.

    Attributes:
        steps: {step, tokens (bytes), minutes, bits (training loss in bits per byte)}: a value per step.
        heldout: {step, tokens, minutes, bits}: a value per evaluation.
    """

    steps: Mapping[str, Series]
    heldout: Mapping[str, Series]


def bits(run: Run) -> Series:
    """The training loss of each step in bits per byte; of tokens, by the bytes for which they stand on average. Nan for a step
    in which no target counts."""
    columns = run.metrics.columns
    return (
        np.where(np.array(columns["counted"]) == 0, math.nan, columns["loss"])
        / math.log(2)
        / float(run.manifest.get("bytes_per_token") or 1)
    )


def curve(run: Run) -> Curve:
    """The series of one run, with nan for missing figures."""
    metrics = run.metrics
    steps = {
        "step": np.array(metrics.columns["step"]),
        "tokens": np.array(metrics.columns["bytes_seen"]),
        "minutes": np.array(metrics.columns["seconds"]) / 60,
        "bits": bits(run),
    }
    at = np.array([float(e["step"]) for e in metrics.evaluations])
    heldout = {"step": at, "bits": np.array([float(e.get("bits_per_byte", "nan")) for e in metrics.evaluations])}
    for name in ("tokens", "minutes"):
        known = len(steps["step"]) > 0
        heldout[name] = np.interp(at, steps["step"], steps[name]) if known else np.full(len(at), math.nan)
    return Curve(steps, heldout)


def smooth(values_N: Series, width: int | None = None) -> Series:
    """Centred moving mean over `width` values (2 % of them, or 10 if that is more, if None), over fewer at the ends."""
    n = len(values_N)
    width = max(min(10, n // 5), round(SHARE * n)) if width is None else width
    if n == 0 or width <= 1:
        return values_N
    known = np.isfinite(values_N)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values_N, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    low = np.maximum(np.arange(n) - width // 2, 0)
    high = np.minimum(np.arange(n) + (width + 1) // 2, n)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (sums[high] - sums[low]) / (counts[high] - counts[low])


def thin(x_N: Series, y_N: Series, most: int = 400) -> tuple[Series, Series]:
    """At most `most` points: means over neighbours, of the points where both are finite."""
    known = np.isfinite(x_N) & np.isfinite(y_N)
    x_N, y_N = x_N[known], y_N[known]
    if len(x_N) <= most:
        return x_N, y_N
    edges = np.linspace(0, len(x_N), most + 1).astype(int)
    return tuple(np.add.reduceat(v, edges[:-1]) / np.diff(edges) for v in (x_N, y_N))  # type: ignore[return-value]


def visible_range(series: Sequence[Series]) -> tuple[float, float] | None:
    """(low, high) of an axis of losses, without the first fall, which would squeeze the rest; None if nothing is finite."""
    known = [s[np.isfinite(s)] for s in series]
    tails = [s[len(s) // 10 :] for s in known if len(s)]
    if not tails:
        return None
    low, high = min(float(t.min()) for t in tails), max(float(t.max()) for t in tails)
    pad = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - pad, high + pad
