"""Compare two models on the same items: the difference of their accuracies, its interval, and a test for pairs.

Comparing item by item is far sharper than comparing two averages, since most items are as easy for one model as for the
other.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.stats import binomtest, norm


@dataclass(frozen=True)
class Paired:
    """The gain of one model over another on the same items.

    Attributes:
        items: The number of items.
        difference: The mean score of the first model minus that of the second, from -1 to 1.
        low: The lower end of the interval of Agresti and Min (2005) for a difference of matched proportions. It is
            Wald's interval after half an item was added to each of the four outcomes of a pair. Unlike Wald's, it does
            not shrink to a point where the models agree on all items.
        high: The upper end of the interval.
        p_value: The two-sided p-value of McNemar's exact test. Under the null hypothesis, an item that only one model
            solves is as likely to be solved by the first as by the second.
        wins: The number of items that only the first model solves.
        losses: The number of items that only the second model solves.
    """

    items: int
    difference: float
    low: float
    high: float
    p_value: float
    wins: int
    losses: int


def compare_pairs(scores: Sequence[float], baseline: Sequence[float], confidence: float = 0.95) -> Paired:
    """Compare the scores of two models on the same items in the same order.

    Args:
        scores: The first model's scores, each 0 or 1.
        baseline: The second model's scores.
        confidence: The confidence level of the interval.

    Raises:
        ValueError: The lengths differ, there are no items, or a score is neither 0 nor 1.
    """
    if len(scores) != len(baseline) or not scores:
        raise ValueError(f"Scores must form pairs, and at least one: got {len(scores)} and {len(baseline)} scores.")
    if other := {*scores, *baseline} - {0, 1}:
        raise ValueError(f"A score must be 0 or 1, got {other.pop()}.")
    n = len(scores)
    wins = sum(a > b for a, b in zip(scores, baseline))
    losses = sum(a < b for a, b in zip(scores, baseline))
    # Half an item for each of four outcomes makes two items.
    padded_n, centre = n + 2, (wins - losses) / (n + 2)
    margin = float(norm.ppf((1 + confidence) / 2)) * math.sqrt(wins + losses + 1 - padded_n * centre**2) / padded_n
    p_value = binomtest(wins, wins + losses).pvalue if wins + losses else 1.0
    low, high = max(-1.0, centre - margin), min(1.0, centre + margin)
    return Paired(n, (wins - losses) / n, low, high, float(p_value), wins, losses)
