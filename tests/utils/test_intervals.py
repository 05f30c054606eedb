"""Intervals of paired differences: the quantiles, the bounds and the verdicts."""

import math

import numpy as np
import pytest
from scipy import stats

from attnres.utils.intervals import Interval, t_quantile


def test_the_quantiles_are_those_of_scipy():
    for freedom in (*range(1, 40), 99, 400):
        assert t_quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), abs=1e-8), freedom


@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_the_interval_is_that_of_a_paired_t_test(count):
    draws = np.random.default_rng(count)
    first, second = draws.normal(size=(2, count)) + 5
    difference = Interval.of((first - second).tolist())
    expected = stats.ttest_rel(first, second).confidence_interval(0.95)
    assert difference.bounds == pytest.approx(tuple(expected), abs=1e-7)
    assert difference.mean == pytest.approx((first - second).mean())
    significant = stats.ttest_rel(first, second).pvalue < 0.05
    assert (difference.verdict != "tie") == significant
    again = Interval.of_deviation(difference.mean, np.std(first - second, ddof=1), count)
    assert again.bounds == pytest.approx(difference.bounds)
    moved = difference.shifted(1.5)
    assert moved.bounds == pytest.approx(tuple(expected + np.array(1.5)), abs=1e-7)


def test_the_verdict_is_a_tie_where_the_interval_holds_zero():
    assert Interval.of([-0.03, -0.02, -0.04]).verdict == "lower"
    assert Interval.of([0.03, 0.02, 0.04]).verdict == "higher"
    assert Interval.of([-0.03, -0.02, 0.01]).verdict == "tie"
    # Lower with every seed, and still a tie: three seeds that differ widely.
    assert Interval.of([-0.001, -0.05, -0.1]).verdict == "tie"
    assert Interval.of([0.0, 0.0]).verdict == "tie"


def test_an_interval_is_written_with_its_mean_and_the_word_tie():
    assert Interval.of([-0.03, -0.02, -0.04]).describe() == "-0.0300 [-0.0548, -0.0052]"
    assert Interval.of([-0.03, -0.02, 0.01]).describe(3) == "-0.013 [-0.065, +0.038], tie"
    assert Interval.of([-0.00001, 0.00001]).describe(2) == "+0.00 [-0.00, +0.00], tie"


def test_one_seed_and_a_run_that_diverged_have_no_interval():
    assert Interval.of([-0.25]).describe() == "-0.2500, one seed"
    assert Interval.of([-0.25]).bounds is None
    assert Interval.of([-0.25, math.nan]).describe() == "+nan, diverged"
