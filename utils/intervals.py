"""Intervals of differences between two models that were trained from the same seeds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import mean, stdev

CONFIDENCE = 0.95
TIE = "tie"  # the word for a difference that the seeds do not tell from zero


@dataclass(frozen=True)
class Interval:
    """A mean of differences within seeds, and its 95% interval by Student's t distribution.

        mean ± t(0.975, n - 1) * s / sqrt(n),   s: standard deviation of the n differences

    Attributes:
        mean: The mean difference, such as the loss of one model minus that of another in nats/token.
        half_width: Half the width of the interval; `None` for a single seed, and if a run diverged.
        count: The number n of seeds.
    """

    mean: float
    half_width: float | None
    count: int

    @classmethod
    def of(cls, differences: Sequence[float]) -> "Interval":
        """Return the interval of paired differences, one of each seed."""
        known = len(differences) > 1 and all(map(math.isfinite, differences))
        return cls.of_deviation(mean(differences), stdev(differences) if known else None, len(differences))

    @classmethod
    def of_deviation(cls, middle: float, deviation: float | None, count: int) -> "Interval":
        """Return the interval of `count` differences from their mean and their standard deviation."""
        half = None if deviation is None else t_quantile(count - 1) * deviation / math.sqrt(count)
        return cls(middle, half, count)

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The ends of the interval; `None` where there is none."""
        return None if self.half_width is None else (self.mean - self.half_width, self.mean + self.half_width)

    @property
    def verdict(self) -> str:
        """What the interval says: `lower`, `higher` or `tie`; `one seed` or `diverged` if there is no interval."""
        if self.bounds is None:
            return "one seed" if math.isfinite(self.mean) else "diverged"
        low, high = self.bounds
        return TIE if low <= 0 <= high else "lower" if high < 0 else "higher"

    def shifted(self, by: float) -> "Interval":
        """Return the interval of the differences plus a number, which is as wide."""
        return replace(self, mean=self.mean + by)

    def describe(self, digits: int = 4) -> str:
        """Format mean and interval, such as `-0.0115 [-0.0639, +0.0409], tie`. Signs show the other verdicts.

        Args:
            digits: The digits behind the point.
        """
        number = f"{self.mean:+z.{digits}f}"
        if self.bounds is None:
            return f"{number}, {self.verdict}"
        low, high = (f"{bound:+.{digits}f}" for bound in self.bounds)  # the sign of a bound shows the verdict
        return f"{number} [{low}, {high}]" + (f", {TIE}" if self.verdict == TIE else "")


@lru_cache
def t_quantile(freedom: int) -> float:
    """Return the t with `P(|T| < t) = 0.95`, for whole degrees of freedom from 1, within 1e-9.

    For whole degrees of freedom the probability is a finite sum (Abramowitz and Stegun, 26.7.3 and 26.7.4), so that no
    library of statistics is needed.
    """
    low, high = 0.0, 13.0  # of one degree of freedom it is 12.7, the largest
    while high - low > 1e-10:
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < CONFIDENCE else (low, middle)
    return (low + high) / 2


def _within(t: float, freedom: int) -> float:
    """Return `P(|T| < t)` of Student's t distribution."""
    angle = math.atan2(t, math.sqrt(freedom))
    cosine, odd = math.cos(angle), freedom % 2
    # 1 + (1/2) c^2 + (1*3)/(2*4) c^4 + ..., or with an odd number c + (2/3) c^3 + (2*4)/(3*5) c^5 + ...
    term, total = cosine if odd else 1.0, 0.0
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= cosine**2 * (power + 1) / (power + 2)
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total


__all__ = ["CONFIDENCE", "TIE", "Interval", "t_quantile"]
