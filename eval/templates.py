"""The templates of task files, compiled once and ended if they do not end by themselves.

A task file comes from its author, and a loop in it (`{% for i in range(10**12) %}`) would hang a run without a word. So
each template has a time limit, in processor time of this process: a busy machine or one that sleeps does not count.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from textwrap import shorten
from typing import Any

import lm_eval.utils
from jinja2 import Template
from jinja2.sandbox import safe_range

# For one prompt of one item, which takes less than a thousandth of that.
TEMPLATE_SECONDS = 10.0


class TemplateTooLong(RuntimeError):
    """A template that did not end within its time."""


@contextmanager
def bounded_templates() -> Iterator[None]:
    """Let the harness compile each template once (for MMLU that saves a minute), and end those that take too long.

    `range` has at most 100,000 numbers, as a longer one may be built in one step, which nothing can interrupt. The time
    limit needs the signals of the main thread; in another thread and on Windows there is none.

    Raises:
        TemplateTooLong: out of whatever renders a template, in one line that shows its beginning.
    """
    environment = lm_eval.utils.env
    compile_template, own_range = environment.from_string, environment.globals["range"]

    @cache
    def from_string(source: str) -> "_Bounded":
        with _time_limit(source):  # constants are computed here
            return _Bounded(compile_template(source), source)

    environment.from_string = from_string
    environment.globals["range"] = safe_range
    try:
        yield
    finally:
        environment.from_string = compile_template
        environment.globals["range"] = own_range


class _Bounded:
    """A template as the harness uses it."""

    def __init__(self, template: Template, source: str) -> None:
        self._template, self._source = template, source

    def render(self, *arguments: Any, **values: Any) -> str:
        with _time_limit(self._source):
            return self._template.render(*arguments, **values)


@contextmanager
def _time_limit(source: str) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def end(*_: object) -> None:
        raise _TimeIsUp

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, TEMPLATE_SECONDS)
    try:
        yield
    except _TimeIsUp:
        raise TemplateTooLong(
            f"A template of its task file takes more than {TEMPLATE_SECONDS:g} s for one item. Look for a loop that "
            f"does not end: {shorten(source, 80, placeholder=' ...')}"
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


class _TimeIsUp(BaseException):
    """Not an `Exception`: Jinja takes those for constants that it cannot compute, and computes them again."""


__all__ = ["TEMPLATE_SECONDS", "TemplateTooLong", "bounded_templates"]
