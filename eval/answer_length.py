"""The number of tokens that a task reserves for an answer, and its limit on a model with a short context.

Task files name the number in one of four ways. A task belongs to all models of a run, so a limit that one model needs
must not reach the next.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from lm_eval.api.task import Task

# The tokens that the harness reserves for an answer if the task sets no number.
DEFAULT_ANSWER = 256
# The names that the harness takes for the number; the first of them decides.
_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


def answer_tokens(generation_kwargs: Mapping[str, Any] | None) -> int:
    """Return the number of tokens that generation arguments reserve for an answer, by whatever name."""
    numbers = [(generation_kwargs or {}).get(name) for name in _NAMES]
    return int(next((number for number in numbers if number is not None), DEFAULT_ANSWER))


def with_answer_tokens(generation_kwargs: Mapping[str, Any] | None, number: int) -> dict[str, Any]:
    """Return generation arguments that reserve `number` tokens for an answer, and are otherwise the same."""
    others = {key: value for key, value in (generation_kwargs or {}).items() if key not in _NAMES}
    return others | {"max_gen_toks": number}


@contextmanager
def limited_answers(task: Task, max_length: int) -> Generator[None]:
    """Within the block, let a task reserve at most half of a model's context for its answer.

    A task may reserve more tokens than a short context has. The other half is left to the prompt.

    Args:
        task: The task. After the block it reserves what it did before.
        max_length: The length of the model's context in tokens.
    """
    before = task.config.generation_kwargs
    limit = max_length // 2
    if task.OUTPUT_TYPE == "generate_until" and answer_tokens(before) > limit:
        task.set_config("generation_kwargs", with_answer_tokens(before, limit))
    try:
        yield
    finally:
        task.set_config("generation_kwargs", before)


__all__ = ["DEFAULT_ANSWER", "answer_tokens", "limited_answers", "with_answer_tokens"]
