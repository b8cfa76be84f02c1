"""Intervals for the mean of a series with correlated neighbours, and for a few independent values. Needs numpy alone.

The series are differences of two runs' losses, step by step on the same batches. Neighbouring differences are correlated, since
weights move slowly, so an interval that treats steps as independent is too narrow. The stationary bootstrap (Politis & Romano,
1994) draws blocks of random, geometrically distributed length instead; the mean length is chosen from the series itself
(Politis & White, 2004, with the correction of Patton, Politis & White, 2009).

That length is best for estimating a variance, and too short for an interval with the stated coverage. `bootstrap_mean` doubles
it, and takes at least √n, so that a correlation too weak to be seen in n values does not narrow the interval. The interval is
widened for the share b / n of the variance that is lost because the series' own mean is subtracted, and by Student's t for
n / b values, since there are about so many independent blocks. `tests/test_results_compare.py` measures how often the
interval covers the true mean of simulated autoregressive series.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.95
DRAWS = 4000
SEED = 20_040_301
"""Seed of the bootstrap's generator: the same series always gives the same interval."""
NORMAL = 10_000
"""Degrees of freedom beyond which the normal distribution replaces Student's t; the quantiles differ by 1 in 10,000."""
FEWEST = 10
"""Fewest values that tell anything about a series' own correlation."""

_BATCH = 250  # draws at a time


@dataclass(frozen=True)
class Interval:
    """A mean with an interval that covers the true mean in a share `LEVEL` of all repetitions.

    Attributes:
        mean, low, high: in the unit of the series. count: number of values. block: mean block length, 1 if independent.
    """

    mean: float
    low: float
    high: float
    count: int
    block: float

    @property
    def clear(self) -> bool:
        """Whether zero lies outside."""
        return self.low > 0 or self.high < 0

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


def block_length(series_N: NDArray[np.float64]) -> float:
    """Mean block length for the stationary bootstrap of a series' mean.

    b = (2 G² / D)^(1/3) n^(1/3) with G = Σ λ(k/M) |k| R(k), D = 2 g(0)², g(0) = Σ λ(k/M) R(k): R are the autocovariances, λ the
    flat-top window, and M twice the lag after which the autocorrelations stay within 2 √(log₁₀ n / n) for
    max(5, √(log₁₀ n)) lags. Between 1 and min(3 √n, n / 3).

    Source: Politis & White 2004, section 3.2; Patton, Politis & White 2009 for D.
    """
    n = len(series_N)
    longest = math.ceil(min(3 * math.sqrt(n), n / 3))
    quiet = max(5, math.ceil(math.sqrt(math.log10(n))))
    lags = min(n - 1, math.ceil(math.sqrt(n)) + quiet)
    centred = series_N - series_N.mean()
    covariance_K = np.array([centred[: n - k] @ centred[k:] / n for k in range(lags + 1)])
    if covariance_K[0] <= 0:
        return 1.0  # a constant
    window = min(2 * _last_correlated(covariance_K / covariance_K[0], n, quiet), lags)
    if window == 0:
        return 1.0
    k = np.arange(1, window + 1)
    flat_top = np.clip(2 * (1 - k / window), 0, 1)
    weighted = flat_top * covariance_K[1 : window + 1]
    g0 = covariance_K[0] + 2 * weighted.sum()
    big_g = 2 * (weighted * k).sum()
    if g0 == 0:
        return float(longest)
    return float(np.clip((2 * big_g**2 / (2 * g0**2)) ** (1 / 3) * n ** (1 / 3), 1, longest))


def _last_correlated(correlation_K: NDArray[np.float64], n: int, quiet: int) -> int:
    """The smallest lag after which `quiet` correlations in a row are small; the last large one, if there is no such lag."""
    large = np.abs(correlation_K) >= 2 * math.sqrt(math.log10(n) / n)
    for lag in range(len(large) - quiet):
        if not large[lag + 1 : lag + 1 + quiet].any():
            return lag
    return int(np.nonzero(large)[0].max())


def bootstrap_means(series_N: NDArray[np.float64], block: float, draws: int) -> NDArray[np.float64]:
    """Means of `draws` resamples of the stationary bootstrap: blocks begin anywhere, lengths are geometric with mean `block`,
    and the series' end is joined to its beginning. Prefix sums make a block one subtraction, however long.
    """
    n = len(series_N)
    generator = np.random.default_rng(SEED)
    sums = np.concatenate([[0.0], np.cumsum(np.concatenate([series_N, series_N]))])
    blocks = math.ceil(n / block + 4 * math.sqrt(n / block) + 10)
    means = []
    for first in range(0, draws, _BATCH):
        rows = min(_BATCH, draws - first)
        lengths = np.minimum(generator.geometric(1 / block, size=(rows, blocks)), n)
        while lengths.sum(axis=1).min() < n:
            more = np.minimum(generator.geometric(1 / block, size=(rows, blocks)), n)
            lengths = np.concatenate([lengths, more], axis=1)
        ends = np.minimum(np.cumsum(lengths, axis=1), n)  # the last block is cut, and later ones are empty
        lengths = np.diff(ends, axis=1, prepend=0)
        starts = generator.integers(0, n, size=lengths.shape)
        means.append((sums[starts + lengths] - sums[starts]).sum(axis=1) / n)
    return np.concatenate(means)


def bootstrap_mean(series_N: NDArray[np.float64], draws: int = DRAWS) -> Interval:
    """The mean of a correlated series with its interval.

    Args:
        series_N: one value per step. draws: resamples; the mean length of their blocks is max(2 b, √n), at most n / 3.

    Raises:
        ValueError: fewer than `FEWEST` values, or one that is not finite.
    """
    series_N = np.asarray(series_N, dtype=np.float64)
    n = len(series_N)
    if n < FEWEST or not np.isfinite(series_N).all():
        raise ValueError(f"an interval needs at least {FEWEST} finite values, not {n}")
    block = min(max(2 * block_length(series_N), math.sqrt(n)), n / 3)
    mean = float(series_N.mean())
    offsets = bootstrap_means(series_N, block, draws) - mean
    freedom = max(1.0, n / block - 1)
    wider = student_quantile(0.5 + LEVEL / 2, freedom) / student_quantile(0.5 + LEVEL / 2, math.inf)
    wider *= math.sqrt(1 / max(1 - block / n, 0.25))
    low, high = np.quantile(offsets, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]) * wider
    return Interval(mean, mean + float(low), mean + float(high), n, block)


def student_mean(values: NDArray[np.float64] | list[float]) -> Interval:
    """The mean of independent values, such as one per seed, with Student's interval.

    Raises:
        ValueError: fewer than two.
    """
    array = np.asarray(values, dtype=np.float64)
    if len(array) < 2:
        raise ValueError("an interval over seeds needs at least two seeds")
    mean, error = float(array.mean()), float(array.std(ddof=1)) / math.sqrt(len(array))
    reach = student_quantile(0.5 + LEVEL / 2, len(array) - 1) * error
    return Interval(mean, mean - reach, mean + reach, len(array), 1.0)


def student_quantile(probability: float, freedom: float) -> float:
    """The value that Student's t stays below with this probability; the normal's if `freedom` is over `NORMAL`.

    With t = sqrt(freedom) tan(a), the density of the angle a is proportional to cos(a)^(freedom - 1): it is summed numerically.
    """
    if not 0.5 < probability < 1:
        raise ValueError(f"a probability must be between 0.5 and 1, not {probability}")
    if freedom > NORMAL:
        return statistics.NormalDist().inv_cdf(probability)
    angle = np.linspace(0, math.pi / 2, 200_001)
    density = np.cos(angle) ** (freedom - 1)
    below = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return math.sqrt(freedom) * math.tan(np.interp(2 * probability - 1, below / below[-1], angle))
