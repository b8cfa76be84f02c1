"""Schedules at their ends, and that they are functions of the step alone."""

import itertools

import pytest

from elman_core.training.schedule import Schedule


def factors(**kwargs):
    schedule = Schedule(**kwargs)
    return [schedule.factor(step) for step in range(schedule.horizon)]


def test_cosine_reaches_the_peak_after_warmup_and_the_end_in_the_last_step():
    made = factors(kind="cosine", warmup=10, horizon=100, final=0.1)
    assert made[:10] == pytest.approx([i / 10 for i in range(1, 11)])
    assert made[10] == 1
    assert made[99] == pytest.approx(0.1)
    assert all(a > b for a, b in itertools.pairwise(made[10:]))
    assert made[10 + 89 // 2] == pytest.approx((1 + 0.1) / 2, abs=0.01)


@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
def test_warmup_zero_starts_at_the_peak(kind):
    made = factors(kind=kind, warmup=0, horizon=50, final=0.2)
    assert made[0] == 1
    assert made[-1] == pytest.approx(1 if kind == "constant" else 0.2)


def test_wsd_is_flat_then_falls_linearly():
    made = factors(kind="wsd", warmup=5, horizon=101, final=0.0, decay=0.2)
    assert made[5:81] == [1] * 76
    assert made[90] == pytest.approx(0.5)
    assert made[100] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("warmup", "horizon"), [(0, 1), (1, 1), (5, 3), (3, 3), (0, 2)])
@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
def test_short_horizons_and_long_warmups_are_finite_and_in_range(kind, warmup, horizon):
    schedule = Schedule(kind, warmup, horizon, 0.1)
    assert all(0 < schedule.factor(s) <= 1 for s in range(horizon + 3))


def test_under_a_time_budget_wsd_follows_the_fraction_of_the_time():
    schedule = Schedule("wsd", 3, None, 0.1, 0.25)
    assert [schedule.factor(s, 0.0) for s in range(3)] == pytest.approx([1 / 3, 2 / 3, 1])
    assert schedule.factor(50, 0.75) == pytest.approx(1)
    assert schedule.factor(50, 0.875) == pytest.approx(0.55)
    assert schedule.factor(50, 1.0) == schedule.factor(50, 1.7) == pytest.approx(0.1)


def test_under_a_time_budget_warm_up_takes_a_tenth_of_the_time_at_most():
    slow = Schedule("wsd", 100, None)
    assert [slow.factor(s, f) for s, f in ((0, 0.0), (5, 0.05), (9, 0.1), (50, 0.5))] == pytest.approx(
        [0.01, 0.5, 1, 1]
    )
