"""What stands between a command and the terminal: signals, and errors that nobody foresaw, end in one line.

While a command is loading there is nothing to clean up, and a signal ends the process at once. While it works, a signal
is an exception, so that what it has begun to write goes. This file imports little: it is there before all else.
"""

import _thread
import contextlib
import importlib
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from types import FrameType, TracebackType

SIGNALS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
# What says by itself what is wrong, wherever it is raised; others do if they are raised in this package.
_OF_THE_SYSTEM = (ImportError, OSError)
_EXPLAINED = (ArithmeticError, RuntimeError, ValueError)
_AGAIN = 0.05  # seconds


class _State:
    """Of this process."""

    working = False
    debug = False
    received: int | None = None


_state = _State()


def show_tracebacks(wanted: bool) -> None:
    """What `--debug` does: errors that end a command are shown with their traceback."""
    _state.debug = _state.debug or wanted


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """The imports of a command, with the model family's before them; what follows is its work."""
    _state.working = False
    importlib.import_module("attnres.family")
    yield
    _state.working = True


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Run a command; leaves by `SystemExit`, with the status that the command line promises."""
    _state.working, _state.debug, _state.received = False, False, None
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as for a job in the background
            signal.signal(number, _receive)
    sys.unraisablehook = _raise_again
    format_warning = warnings.formatwarning
    # The family's own warnings are for the user, whom the place in the code tells nothing.
    warnings.formatwarning = lambda message, category, *place, **line: (
        f"attnres: warning: {' '.join(str(message).split())}\n"
        if category.__name__ == "FamilyWarning"
        else format_warning(message, category, *place, **line)
    )
    code: int | str | None = 0
    try:
        yield
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        code = 1
        if _state.received is None:
            print(_told(error), file=sys.stderr)
    finally:
        warnings.formatwarning = format_warning
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # nothing is left to interrupt
        if _state.received is not None:
            code = 128 + _state.received
            print(_line(_state.received), file=sys.stderr)
    sys.exit(code)


def _line(number: int) -> str:
    return f"attnres: {SIGNALS[signal.Signals(number)]}."


def _receive(number: int, frame: FrameType | None) -> None:
    if not _state.working:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os.write(2, f"{_line(number)}\n".encode())
        os._exit(128 + number)
    _state.received = number
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


def _raise_again(unraisable: "sys.UnraisableHookArgs") -> None:
    """A signal that came in a destructor or a callback, where Python drops what is raised, comes once more."""
    if _state.received is None or not isinstance(unraisable.exc_value, KeyboardInterrupt | SystemExit):
        sys.__unraisablehook__(unraisable)
        return
    import threading

    again = threading.Timer(_AGAIN, _thread.interrupt_main, (_state.received,))
    again.daemon = True
    again.start()


def _told(error: BaseException) -> str:
    """The error in one line. What nobody foresaw is written to a file with its traceback, which the line names."""
    import traceback

    from attnres.utils.disks import why_not_written
    from attnres.utils.processes import is_lost_connection

    text = why_not_written(error) if isinstance(error, OSError) else " ".join(str(error).split())
    # A name in it may hold anything, such as what changes the colours of a terminal.
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    trace = "".join(traceback.format_exception(error))
    if _state.debug:
        print(trace, end="", file=sys.stderr)
    if is_lost_connection(error):
        return "attnres: another process of this run has ended; its own message says why."
    if isinstance(error, _OF_THE_SYSTEM) or (isinstance(error, _EXPLAINED) and _is_ours(error.__traceback__)):
        return f"attnres: {text or type(error).__name__}"
    line = f"attnres: unforeseen {type(error).__name__}{text and ': '}{text}"
    return line if _state.debug else f"{line} ({_written(trace)})"


def _is_ours(trace: TracebackType | None) -> bool:
    """Whether the last frame is one of this package."""
    module = None
    while trace is not None:
        module, trace = trace.tb_frame.f_globals.get("__name__", ""), trace.tb_next
    return module is not None and module.partition(".")[0] in ("attnres", "benchmarks")


def _written(trace: str) -> str:
    import tempfile

    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="attnres-", suffix=".txt", delete=False, encoding="utf-8", errors="replace"
        ) as file:
            file.write(trace)
    except OSError as error:
        return f"its traceback could not be written, {' '.join(str(error).split())}; --debug shows it"
    return f"traceback: {file.name}; --debug shows it"
