"""Paired comparisons use McNemar's exact test, and an interval that covers the truth as often as it claims."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnres.eval.paired import compare_pairs

SCORES = st.lists(st.tuples(st.sampled_from([0.0, 1.0]), st.sampled_from([0.0, 1.0])), min_size=1, max_size=60)


@given(SCORES)
def test_the_difference_of_the_means_changes_sign_with_the_order(pairs):
    first, second = zip(*pairs)
    forth, back = compare_pairs(first, second), compare_pairs(second, first)
    assert forth.difference == pytest.approx(np.mean(first) - np.mean(second))
    assert (back.difference, back.low, back.high) == pytest.approx((-forth.difference, -forth.high, -forth.low))
    assert forth.p_value == pytest.approx(back.p_value)
    assert -1 <= forth.low <= forth.difference <= forth.high <= 1
    assert (forth.wins, forth.losses, forth.items) == (back.losses, back.wins, len(pairs))


@pytest.mark.parametrize("wins, losses", list(product([0, 1, 5, 12], [0, 3, 7])))
def test_the_p_value_is_the_probability_of_a_split_at_least_as_uneven(wins, losses):
    discordant = wins + losses
    chance = [math.comb(discordant, k) / 2**discordant for k in range(discordant + 1)]
    expected = sum(p for p in chance if p <= chance[wins] * (1 + 1e-9))
    scores = [(1, 0)] * wins + [(0, 1)] * losses + [(1, 1)] * 4
    assert compare_pairs(*zip(*scores)).p_value == pytest.approx(expected)


@pytest.mark.slow
@pytest.mark.parametrize("first, second, agreement", [(0.5, 0.5, 0.9), (0.3, 0.25, 0.5), (0.02, 0.01, 0.2)])
def test_95_of_100_intervals_hold_the_true_difference(first, second, agreement):
    """`agreement` is the share of items on which both models draw the same random number."""
    random, trials, n, held = np.random.default_rng(0), 2000, 80, 0
    for _ in range(trials):
        luck = random.random((2, n))
        luck[1] = np.where(random.random(n) < agreement, luck[0], luck[1])
        pair = compare_pairs((luck[0] < first).astype(float).tolist(), (luck[1] < second).astype(float).tolist())
        held += pair.low <= first - second <= pair.high
    assert held / trials > 0.94


def test_the_interval_of_models_that_agree_everywhere_is_not_a_point():
    pair = compare_pairs([1.0, 0.0] * 50, [1.0, 0.0] * 50)
    assert (pair.difference, pair.p_value) == (0, 1)
    assert pair.low == pytest.approx(-pair.high)
    assert 0.01 < pair.high < 0.03


@pytest.mark.parametrize(
    "scores, baseline, message",
    [([1.0], [1.0, 0.0], "1 and 2 scores"), ([], [], "0 and 0 scores"), ([0.5], [1.0], "must be 0 or 1, got 0.5")],
)
def test_scores_that_form_no_pairs_are_refused(scores, baseline, message):
    with pytest.raises(ValueError, match=message):
        compare_pairs(scores, baseline)
