"""Run a command so that signals and errors give one line on the terminal and the right exit status.

While a command is loading, there is nothing to clean up, so a signal ends the process at once. While it works, a signal
becomes an exception, so that unfinished files are removed. This file is imported first, so it imports little.
"""

import _thread
import contextlib
import importlib
import os
import signal
import sys
import warnings
from collections.abc import Generator
from types import FrameType, TracebackType

SIGNALS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
# Errors with messages for users, wherever they are raised.
_FOR_USERS = (ImportError, OSError)
# Errors with messages for users if this package raises them. From another package they are unforeseen.
_FOR_USERS_IF_OURS = (ArithmeticError, RuntimeError, ValueError)
_LOADING = "Loading PyTorch and Transformers ..."
# The variables by which launchers number the processes of a run. Only the first process says what it loads.
_RANKS = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
_RESEND_AFTER = 0.05  # seconds until a lost signal is sent again


class _State:
    """The state of the command that this process runs."""

    working = False  # whether the command has loaded its modules and works
    debug = False  # whether `--debug` was given
    received: int | None = None  # the signal that ended the command


_state = _State()


def show_tracebacks(is_given: bool) -> None:
    """Handle `--debug`, which may stand before and after the command: show the traceback of an error."""
    _state.debug = _state.debug or is_given


@contextlib.contextmanager
def loading() -> Generator[None]:
    """Import the model family, then run the block with a command's own imports. After the block, the work begins.

    A terminal shows at once what takes these seconds; a file gets a line if they become many.
    """
    from rich.console import Console

    from attnres.utils.progress import status

    _state.working = False
    with contextlib.ExitStack() as stack:
        if not any(os.environ.get(name, "0") != "0" for name in _RANKS):
            if sys.stderr.isatty():
                # No spinner, since a signal ends the process here before a spinner could be removed.
                print(_LOADING, file=sys.stderr, flush=True)
            else:
                stack.enter_context(status(Console(stderr=True), _LOADING))
        importlib.import_module("attnres.family")
        yield
    _state.working = True


@contextlib.contextmanager
def guarded() -> Generator[None]:
    """Run the block, a command, and raise `SystemExit` with the exit status that `main.py` documents."""
    _state.working, _state.debug, _state.received = False, False, None
    for number in SIGNALS:
        # A shell makes background jobs ignore signals. They must still ignore them.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _receive)
    sys.unraisablehook = _raise_again
    format_warning = warnings.formatwarning

    # Warnings of the model family are for users, so they are printed without the place in the code.
    def format_for_user(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if category.__name__ == "FamilyWarning":
            return f"attnres: warning: {' '.join(str(message).split())}\n"
        return format_warning(message, category, filename, lineno, line)

    warnings.formatwarning = format_for_user
    code: int | str | None = 0
    try:
        yield
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        code = 1
        if _state.received is None:
            print(_describe(error), file=sys.stderr)
    finally:
        warnings.formatwarning = format_warning
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # the work is over, so a second signal interrupts nothing
        if _state.received is not None:
            code = 128 + _state.received
            print(_line(_state.received), file=sys.stderr)
    sys.exit(code)


def _line(number: int) -> str:
    """Return the line to print when this signal ends the command."""
    return f"attnres: {SIGNALS[signal.Signals(number)]}."


def _receive(number: int, frame: FrameType | None) -> None:
    """Handle a signal: end the process at once while it is loading, and raise an exception while it works."""
    if not _state.working:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os.write(2, f"{_line(number)}\n".encode())
        os._exit(128 + number)
    _state.received = number
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


def _raise_again(unraisable: "sys.UnraisableHookArgs") -> None:
    """Send a signal again if it arrived in a destructor or callback, where Python drops its exception."""
    if _state.received is None or not isinstance(unraisable.exc_value, KeyboardInterrupt | SystemExit):
        sys.__unraisablehook__(unraisable)
        return
    import threading

    timer = threading.Timer(_RESEND_AFTER, _thread.interrupt_main, (_state.received,))
    timer.daemon = True
    timer.start()


def _describe(error: BaseException) -> str:
    """Return an error in one line. For an unforeseen error, write the traceback to a file that the line names."""
    import traceback

    from attnres.utils.errors import is_lost_connection, why_not_written
    from attnres.utils.wording import printable

    text = why_not_written(error) if isinstance(error, OSError) else " ".join(str(error).split())
    if isinstance(error, ModuleNotFoundError) and text.startswith("No module named"):
        text = _name_extra(error, text)
    # A name in the message may contain control characters, which could change the terminal.
    text = printable(text)
    trace = "".join(traceback.format_exception(error))
    if _state.debug:
        print(trace, end="", file=sys.stderr)
    if is_lost_connection(error):
        return "attnres: another process of this run has ended; see its message."
    if isinstance(error, _FOR_USERS) or (isinstance(error, _FOR_USERS_IF_OURS) and _is_ours(error.__traceback__)):
        return f"attnres: {text or type(error).__name__}"
    line = f"attnres: unforeseen {type(error).__name__}{text and ': '}{text}"
    return line if _state.debug else f"{line} ({_write(trace)})"


def _name_extra(error: ModuleNotFoundError, text: str) -> str:
    """Add to the message about a missing module the command that installs it, if an extra of this package has it."""
    from attnres.utils.wording import extras_with, install_command

    extras = extras_with((error.name or "").partition(".")[0])
    if not extras:
        return text
    return f"{text}. It comes with `attnres[{extras[0]}]`: {install_command(extras[0])}"


def _is_ours(trace: TracebackType | None) -> bool:
    """Return whether the innermost frame of a traceback is in this package or its benchmarks."""
    module = None
    while trace is not None:
        module, trace = trace.tb_frame.f_globals.get("__name__", ""), trace.tb_next
    return module is not None and module.partition(".")[0] in ("attnres", "benchmarks")


def _write(trace: str) -> str:
    """Write a traceback to a temporary file, and return the words that name this file."""
    import tempfile

    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="attnres-", suffix=".txt", delete=False, encoding="utf-8", errors="replace"
        ) as file:
            file.write(trace)
    except OSError as error:
        return f"its traceback could not be written, {' '.join(str(error).split())}; --debug shows it"
    return f"traceback: {file.name}; --debug shows it"
