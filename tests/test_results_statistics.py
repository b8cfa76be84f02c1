"""Intervals: against hand computations, tables, and how often they cover the truth."""

from __future__ import annotations

import math

import numpy as np
import pytest

from elman_core.experiments.results.statistics import (
    block_length,
    bootstrap_mean,
    student_mean,
    student_quantile,
)


def autoregressive(correlation: float, count: int, length: int, seed: int = 1) -> np.ndarray:
    """`count` series with mean zero."""
    noise = np.random.default_rng(seed).standard_normal((length + 200, count))
    series = noise.copy()
    for i in range(1, length + 200):
        series[i] = correlation * series[i - 1] + noise[i]
    return np.ascontiguousarray(series[200:].T)


@pytest.mark.parametrize(
    ("probability", "freedom", "value"),  # printed tables of Student's t
    [
        (0.975, 1, 12.706),
        (0.975, 2, 4.303),
        (0.975, 5, 2.571),
        (0.975, 30, 2.042),
        (0.95, 10, 1.812),
        (0.995, 4, 4.604),
    ],
)
def test_quantiles_of_student_are_those_of_the_tables(probability, freedom, value):
    assert student_quantile(probability, freedom) == pytest.approx(value, abs=6e-4)


def test_an_interval_over_seeds_by_hand():
    # differences 0.010, 0.014, 0.018: mean 0.014, deviation 0.004, error 0.004 / sqrt 3, t(0.975, 2) = 4.3027
    found = student_mean([0.010, 0.014, 0.018])
    assert found.mean == pytest.approx(0.014)
    assert found.half_width == pytest.approx(4.30265 * 0.004 / math.sqrt(3), rel=1e-5)
    assert found.clear
    assert not student_mean([-0.01, 0.03]).clear
    with pytest.raises(ValueError, match="two seeds"):
        student_mean([1.0])


def test_the_block_length_of_independent_values_is_short_and_of_correlated_ones_that_of_theory():
    n = 20_000
    assert block_length(np.random.default_rng(0).standard_normal(n)) < 3
    for correlation in (0.5, 0.8):
        theory = (2 * correlation / (1 - correlation**2)) ** (2 / 3) * n ** (1 / 3)  # G / g(0) = 2ρ / (1 - ρ²)
        found = np.median([block_length(s) for s in autoregressive(correlation, 7, n)])
        assert found == pytest.approx(theory, rel=0.2)


@pytest.mark.parametrize("series", [np.ones(9), np.array([*np.ones(20), np.nan])])
def test_too_few_values_or_one_that_is_not_finite_is_an_error(series):
    with pytest.raises(ValueError, match="finite values"):
        bootstrap_mean(series)


@pytest.mark.parametrize(("correlation", "length", "least"), [(0.0, 150, 0.92), (0.6, 200, 0.90), (0.6, 1000, 0.925)])
def test_it_covers_what_it_says(correlation, length, least):
    """Of 300 simulated series, 95 of 100 intervals should hold the true mean; independence assumed would give 0.67 for 0.6."""
    series = autoregressive(correlation, 300, length)
    found = [bootstrap_mean(s, draws=400) for s in series]
    covered = np.mean([i.low < 0 < i.high for i in found])
    assert least <= covered <= 0.99
    ideal = 1.96 / (1 - correlation) / math.sqrt(length)  # half the width, were the correlation known
    assert 0.9 <= np.mean([i.half_width for i in found]) / ideal <= 1.3
    naive = np.mean([abs(s.mean()) < 1.96 * s.std() / math.sqrt(length) for s in series])
    assert correlation < 0.5 or naive < 0.75
