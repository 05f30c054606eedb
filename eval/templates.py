"""Let the harness compile each template of a task once.

By itself, it compiles a template for every item, which takes a minute for MMLU.
"""

from collections.abc import Generator
from contextlib import contextmanager
from functools import cache

import lm_eval.utils


@contextmanager
def templates_compiled_once() -> Generator[None]:
    """Keep compiled templates inside the context."""
    # The harness renders every template by the global `lm_eval.utils.env`, which no argument can replace.
    environment = lm_eval.utils.env
    compile_template = environment.from_string
    environment.from_string = cache(compile_template)
    try:
        yield
    finally:
        environment.from_string = compile_template


__all__ = ["templates_compiled_once"]
