"""Two models on the same items: the difference of their accuracies, its interval, and a test for pairs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.stats import binomtest, norm


@dataclass(frozen=True)
class Paired:
    """What one model gains over another on `items` items.

    Attributes:
        difference: mean score of the first minus that of the second.
        low: the lower end of the interval of Agresti and Min (2005) for a difference of matched proportions: that of
            Wald after half an item was added to each of the four outcomes of a pair. It keeps its width where the two
            agree.
        high: the upper end.
        p_value: of McNemar's exact test, two-sided: under the null hypothesis each item that only one model solves is
            as likely to be the first's as the second's.
        wins: the items that only the first solves.
        losses: the items that only the second solves.
    """

    items: int
    difference: float
    low: float
    high: float
    p_value: float
    wins: int
    losses: int


def compare_pairs(scores: Sequence[float], baseline: Sequence[float], confidence: float = 0.95) -> Paired:
    """Compare the scores, 0 or 1, of two models on the same items in the same order.

    Raises:
        ValueError: the lengths differ, there are no items, or a score is neither 0 nor 1.
    """
    if len(scores) != len(baseline) or not scores:
        raise ValueError(f"{len(scores)} and {len(baseline)} scores are not pairs.")
    if other := {*scores, *baseline} - {0, 1}:
        raise ValueError(f"A score of {other.pop()} is neither 0 nor 1.")
    n = len(scores)
    wins = sum(a > b for a, b in zip(scores, baseline))
    losses = sum(a < b for a, b in zip(scores, baseline))
    padded_n, centre = n + 2, (wins - losses) / (n + 2)
    margin = norm.ppf((1 + confidence) / 2) * math.sqrt(wins + losses + 1 - padded_n * centre**2) / padded_n
    p_value = binomtest(wins, wins + losses).pvalue if wins + losses else 1.0
    low, high = max(-1.0, centre - margin), min(1.0, centre + margin)
    return Paired(n, (wins - losses) / n, low, high, float(p_value), wins, losses)
