"""Requests of the harness, with random words."""

import random

import pytest
from lm_eval.api.instance import Instance

Requests = list[tuple[None, list[int], list[int]]]


def words(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(3, 99) for _ in range(length)]


def questions(rng: random.Random, examples: int, items: int, question: int, choice: int) -> Requests:
    """Return items with four choices after common examples. Lengths are in tokens; questions and choices vary."""
    shared, requests = words(rng, examples), []
    for _ in range(items):
        context = shared + words(rng, question + rng.randrange(5))
        requests += [(None, context, words(rng, choice + rng.randrange(5 if choice > 1 else 1))) for _ in range(4)]
    return requests


def assert_same(actual: list, expected: list, tolerance: float = 1e-4) -> None:
    assert [greedy for _, greedy in actual] == [greedy for _, greedy in expected]
    for (value, _), (reference, _) in zip(actual, expected):
        assert value == pytest.approx(reference, abs=tolerance)


def generation(contexts: list[str], **arguments) -> list[Instance]:
    arguments = {"until": ["w7"], "max_gen_toks": 6, "do_sample": False} | arguments
    return [Instance("generate_until", {}, (context, arguments), i) for i, context in enumerate(contexts)]


def texts(rng: random.Random, *lengths: int) -> list[str]:
    return [" ".join(f"w{token}" for token in words(rng, length)) for length in lengths]
