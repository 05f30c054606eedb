"""Compile the templates of task files once, and stop those that take too much time or memory.

Anyone can write a task file. A loop such as `{% for i in range(10**12) %}` would make a run hang silently, and
`{{ "x" * 10**10 }}` would take all memory in one step, which nothing can interrupt. Two limits prevent this:

- Each render has a limit on the processor time of this process, so that a busy or sleeping machine does not count.
- Each operation that can build something large in one step checks the size of its result first.
"""

import ctypes
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from textwrap import shorten
from typing import Any

import lm_eval.utils
from jinja2 import Template, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context
from jinja2.sandbox import SandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from markupsafe import Markup

# Processor time for one render. Usual templates take less than a thousandth of it.
TEMPLATE_SECONDS = 10.0
# Characters of a text, or elements of a list. The longest prompts of benchmarks have about 100,000 characters.
MAX_LENGTH = 10_000_000
# Bits of a whole number: 30,000 digits. Python prints at most 4,300.
MAX_BITS = 100_000
MAX_RANGE = 100_000  # numbers in a `range`


class TemplateTooLong(RuntimeError):
    """The error for a template that takes too much time or memory. The message is one line that shows its beginning."""


class _TooLarge(Exception):
    """The error for an operation of a template that would build too much. The message names it and its bound."""


class _TimeIsUp(BaseException):
    """The alarm of the time limit.

    A `BaseException`, because Jinja catches `Exception` while it computes constants, and would compute them again.
    """


@contextmanager
def bounded_templates() -> Iterator[None]:
    """Let the harness compile each template once, which saves a minute for MMLU, and bound its time and memory.

    Python functions that a task names by `!function` are not bounded. Regular expressions and other long steps in C are
    stopped by the time limit only once they end.

    Raises:
        TemplateTooLong: Inside the context, from any code that renders a template.
    """
    # The harness renders every template by the global `lm_eval.utils.env`, which no argument can replace. It calls one
    # method of that object, which is replaced here inside the context.
    environment = lm_eval.utils.env
    compile_template = environment.from_string
    bounded = _BoundedEnvironment(
        loader=environment.loader,
        undefined=environment.undefined,
        keep_trailing_newline=environment.keep_trailing_newline,
    )
    # If both environments have a filter or a global, such as `range`, the bounded one stays.
    for name, function in environment.filters.items():
        bounded.filters.setdefault(name, function)
    bounded.tests |= environment.tests
    for name, value in environment.globals.items():
        bounded.globals.setdefault(name, value)

    @cache
    def from_string(source: str) -> "_BoundedTemplate":
        # Compiling is bounded too, because Jinja computes constants there.
        return _BoundedTemplate(_within_bounds(lambda: bounded.from_string(source), source), source)

    environment.from_string = from_string
    try:
        yield
    finally:
        environment.from_string = compile_template


class _BoundedTemplate:
    """A template with the one method that the harness calls."""

    def __init__(self, template: Template, source: str) -> None:
        self._template, self._source = template, source

    def render(self, *arguments: Any, **values: Any) -> str:
        def write() -> str:
            parts, length = [], 0
            for part in self._template.generate(*arguments, **values):
                length += len(part)
                _check("the rendered text", length)
                parts.append(part)
            return "".join(parts)

        return _within_bounds(write, self._source)


def _within_bounds(work: Callable[[], Any], source: str) -> Any:
    """Return the result of `work`, or raise TemplateTooLong in one line that shows the template `source`."""
    try:
        return _within_time(work)
    except _TimeIsUp:
        reason = f"takes more than {TEMPLATE_SECONDS:g} s for one item. Look for a loop that does not end"
    except _TooLarge as error:
        reason = f"builds too much in one item: {error}"
    except MemoryError:
        reason = "takes more memory than there is for one item. Look for a text or list that grows in a loop"
    text = shorten(source, 80, placeholder=" ...")
    # A template without spaces has no place where `shorten` could cut it.
    text = text if text.strip(". ") else f"{source[:76]} ..."
    raise TemplateTooLong(f"A template of its task file {reason}: {text}")


def _within_time(work: Callable[[], Any]) -> Any:
    """Return the result of `work`, or raise _TimeIsUp once it took `TEMPLATE_SECONDS`.

    The alarm raises only while `armed` is true. After a long step in C, it may raise inside the inner `finally` clause.
    The caller sees no difference: _TimeIsUp leaves this function.
    """
    armed = False

    def is_armed() -> bool:
        return armed

    start = time.process_time()
    cancel = _alarm(is_armed)
    try:
        try:
            armed = True
            result = work()
        finally:
            armed = False
        # Python prints and drops an exception in a destructor or a weak reference's callback. So the alarm may be lost.
        if time.process_time() - start > 2 * TEMPLATE_SECONDS:
            raise _TimeIsUp
        return result
    finally:
        cancel()


def _alarm(is_armed: Callable[[], bool]) -> Callable[[], None]:
    """Set an alarm that raises _TimeIsUp in this thread after `TEMPLATE_SECONDS`, if `is_armed()` is true then.

    Returns:
        The function that cancels the alarm. After its call, nothing is raised.
    """
    if threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer"):
        return _alarm_by_signal(is_armed)
    return _alarm_by_thread(is_armed)


def _alarm_by_signal(is_armed: Callable[[], bool]) -> Callable[[], None]:
    def ring(*_: object) -> None:
        if is_armed():
            raise _TimeIsUp

    def cancel() -> None:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)

    before = signal.signal(signal.SIGVTALRM, ring)
    signal.setitimer(signal.ITIMER_VIRTUAL, TEMPLATE_SECONDS)
    return cancel


def _alarm_by_thread(is_armed: Callable[[], bool]) -> Callable[[], None]:
    """Set the alarm by a second thread, which raises in this one by Python's C API.

    Only the main thread receives signals, and Windows has no timer signal.
    """
    caller = ctypes.c_ulong(threading.get_ident())
    raise_in_thread = ctypes.pythonapi.PyThreadState_SetAsyncExc
    ended, lock = threading.Event(), threading.Lock()

    def watch() -> None:
        start = time.process_time()
        while (left := TEMPLATE_SECONDS - (time.process_time() - start)) > 0:
            if ended.wait(max(left, 0.01)):
                return
        with lock:
            if is_armed() and not ended.is_set():
                raise_in_thread(caller, ctypes.py_object(_TimeIsUp))

    def cancel() -> None:
        with lock:
            ended.set()
            # NULL takes back an exception that was raised in the thread and has not arrived there yet.
            raise_in_thread(caller, None)

    threading.Thread(target=watch, daemon=True).start()
    return cancel


def _check(name: str, size: int, bound: int = MAX_LENGTH, unit: str = "characters or elements") -> None:
    """Raise _TooLarge, with `name` in its message, if a size exceeds its bound."""
    if size > bound:
        raise _TooLarge(f"{name} must be at most {bound:,} {unit}")


def _length(value: Any) -> int:
    """Return the length of a text or list, and 0 for other values."""
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0


def _check_format(spec: str, arguments: Any = ()) -> None:
    """Check the widths and precisions of a format, which could pad to any length.

    Args:
        spec: The format without its text.
        arguments: The values to format; `*` takes a width from them.
    """
    widths = [int(digits) for digits in re.findall(r"[0-9]{1,4000}", spec)]
    if "*" in spec:
        values = arguments if isinstance(arguments, tuple) else (arguments,)
        widths += [abs(argument) for argument in values if isinstance(argument, int)]
    _check("the width in a format", max(widths, default=0))


def _check_operation(operator: str, left: Any, right: Any) -> None:
    """Check the size of a binary operator's result before it is computed."""
    if operator == "+":
        _check("the result of `+`", _length(left) + _length(right))
    elif operator == "%" and isinstance(left, str | bytes):
        text = left if isinstance(left, str) else left.decode("latin-1")
        # Only numbers after a `%` are widths. Other numbers belong to the text.
        _check_format(" ".join(re.findall(r"%(?:\([^)]*\))?([^a-zA-Z%]*)", text)), right)
    elif isinstance(left, int) and isinstance(right, int):
        bits, other = left.bit_length(), right.bit_length()
        if operator == "*":
            _check("a product", bits + other, MAX_BITS, "bits")
        elif operator == "**" and right > 0 and bits > 1:  # 0, 1 and -1 stay small
            _check("a power", bits * right, MAX_BITS, "bits")
    elif operator == "*":
        sequence, times = (right, left) if isinstance(left, int) else (left, right)
        if isinstance(times, int):
            _check("the result of `*`", _length(sequence) * times)


def _check_call(function: Any, arguments: tuple, keywords: dict[str, Any]) -> None:
    """Check calls of the methods of texts and integers that can return far more than they receive."""
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    numbers = [abs(value) for value in (*arguments, *keywords.values()) if isinstance(value, int)]
    size = max(numbers, default=0)
    if isinstance(owner, str | bytes):
        if name in ("center", "ljust", "rjust", "zfill"):
            _check(f"the width of `{name}`", size)
        elif name == "expandtabs":
            tab = "\t" if isinstance(owner, str) else b"\t"
            _check("the result of `expandtabs`", size * owner.count(tab) + len(owner))
        elif name == "replace" and len(arguments) >= 2:
            _check_replacement(owner, *arguments[:2])
        elif name == "join" and arguments and isinstance(arguments[0], list | tuple):
            _check_join(owner, arguments[0])
    elif isinstance(owner, int) and name == "to_bytes":
        _check("the length of `to_bytes`", size)


def _check_replacement(text: Any, old: Any, new: Any) -> None:
    if isinstance(text, str | bytes) and type(text) is type(old) is type(new):
        _check("the result of `replace`", len(text) + text.count(old) * len(new))


def _check_join(separator: Any, parts: Any) -> None:
    _check("the result of `join`", _length(separator) * len(parts) + sum(map(_length, parts)))


def _bounded_range(*arguments: int) -> range:
    numbers = range(*arguments)
    # `len` fails for the longest ranges. This count may be one too high.
    count = max(0, (numbers.stop - numbers.start) // numbers.step + 1)
    _check("`range`", count - 1, MAX_RANGE, "numbers")
    return numbers


# Filters that pad or repeat -> the check of their arguments.
_FILTER_CHECKS: dict[str, Callable[..., object]] = {
    "batch": lambda value, count, fill=None: _check("the size of `batch`", count),
    "center": lambda value, width=80: _check("the width of `center`", width),
    "format": lambda value, *arguments, **named: _check_operation("%", str(value), arguments or named),
    "indent": lambda value, width=4, *_, **__: _check(
        "the result of `indent`", (width if isinstance(width, int) else len(width)) * (str(value).count("\n") + 1)
    ),
    "join": lambda value, d="", attribute=None: isinstance(value, list | tuple) and _check_join(str(d), value),
    "replace": lambda value, old, new, count=None: _check_replacement(str(value), str(old), str(new)),
    "round": lambda value, precision=0, method="common": _check("the precision of `round`", precision, 1000, "digits"),
    "slice": lambda value, slices, fill=None: _check("the number of `slice`", slices),
    "tojson": lambda value, indent=None: _check("the indent of `tojson`", indent or 0, 1000, "characters"),
}


class _BoundedFormats:
    """A mixin that checks the format of each field of `str.format`, after widths from arguments are filled in."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        if isinstance(value, str | int | float):  # dates and the like read formats in another way
            _check_format(format_spec)
        return super().format_field(value, format_spec)


class _BoundedFormatter(_BoundedFormats, SandboxedFormatter):
    pass


class _BoundedEscapeFormatter(_BoundedFormats, SandboxedEscapeFormatter):
    pass


def _checked_filter(function: Callable[..., Any], check: Callable[..., object]) -> Callable[..., Any]:
    """Return a filter that calls `check` with its arguments first."""
    # Jinja passes its context or environment to some filters, before the value.
    skipped = int(hasattr(function, "jinja_pass_arg"))

    @wraps(function)  # keeps `jinja_pass_arg`
    def checked(*arguments: Any, **keywords: Any) -> Any:
        check(*arguments[skipped:], **keywords)
        return function(*arguments, **keywords)

    return checked


class _BoundedCodeGenerator(CodeGenerator):
    """A code generator that compiles `~` to a call of `_BoundedEnvironment.concatenate`, which checks the sizes."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concatenate((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _BoundedEnvironment(SandboxedEnvironment):
    """Jinja's sandbox with a limit for each operation that can build something large in one step.

    Methods without a docstring override those of Jinja's sandbox: they check, then call the overridden method.
    """

    code_generator_class = _BoundedCodeGenerator
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.globals["range"] = _bounded_range
        for name, check in _FILTER_CHECKS.items():
            self.filters[name] = _checked_filter(self.filters[name], check)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_operation(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, function: Any, *arguments: Any, **keywords: Any) -> Any:
        _check_call(function, arguments, keywords)
        return super().call(context, function, *arguments, **keywords)

    def concatenate(self, parts: tuple) -> str:
        """Join the operands of `~`, which `_BoundedCodeGenerator` passes here."""
        texts = [*map(str, parts)]
        _check_join("", texts)
        return "".join(texts)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        text = value.__self__
        is_markup = isinstance(text, Markup)
        formatter = _BoundedEscapeFormatter(self, escape=text.escape) if is_markup else _BoundedFormatter(self)

        def format_text(*arguments: Any, **keywords: Any) -> str:
            if value.__name__ == "format_map":
                arguments, keywords = (), *arguments
            return type(text)(formatter.vformat(text, arguments, keywords))

        return format_text


__all__ = ["MAX_BITS", "MAX_LENGTH", "MAX_RANGE", "TEMPLATE_SECONDS", "TemplateTooLong", "bounded_templates"]
