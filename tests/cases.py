"""Choose few cases that have each value of several lists, where a product of the lists would prove nothing more."""

from collections.abc import Sequence


def each_once(*lists: Sequence) -> list[tuple]:
    """Return as many tuples as the longest list has values: each value of each list is in one of them or more.

    A shorter list is repeated. Two lists of which the length of one divides that of the other always meet in the same
    pairs.
    """
    longest = max(map(len, lists))
    return [tuple(values[number % len(values)] for values in lists) for number in range(longest)]
