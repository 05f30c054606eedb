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
from types import FrameType, SimpleNamespace

SIGNALS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
_LOADING = "Loading PyTorch and Transformers ..."
# The variables by which launchers number the processes of a run. Only the first process says what it loads.
_RANKS = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
_RESEND_AFTER = 0.05  # seconds until a lost signal is sent again


# The state of the command that this process runs: whether it has loaded its modules and works, whether `--debug` was
# given, and the signal that ended it.
_state = SimpleNamespace(working=False, debug=False, received=None)


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
            signal.signal(number, _receive_signal)
    sys.unraisablehook = _raise_signal_again
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
            print(_describe_error(error), file=sys.stderr)
    finally:
        warnings.formatwarning = format_warning
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # the work is over, so a second signal interrupts nothing
        if _state.received is not None:
            code = 128 + _state.received
            print(_line_of_signal(_state.received), file=sys.stderr)
    sys.exit(code)


def _line_of_signal(number: int) -> str:
    """Return the line to print when this signal ends the command."""
    return f"attnres: {SIGNALS[signal.Signals(number)]}."


def _receive_signal(number: int, frame: FrameType | None) -> None:
    """Handle a signal: end the process at once while it is loading, and raise an exception while it works."""
    if not _state.working:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os.write(2, f"{_line_of_signal(number)}\n".encode())
        os._exit(128 + number)
    _state.received = number
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


def _raise_signal_again(unraisable: "sys.UnraisableHookArgs") -> None:
    """Send a signal again if it arrived in a destructor or callback, where Python drops its exception."""
    if _state.received is None or not isinstance(unraisable.exc_value, KeyboardInterrupt | SystemExit):
        sys.__unraisablehook__(unraisable)
        return
    import threading

    timer = threading.Timer(_RESEND_AFTER, _thread.interrupt_main, (_state.received,))
    timer.daemon = True
    timer.start()


def _describe_error(error: BaseException) -> str:
    """Return an error in one line. For an unforeseen error, write the traceback to a file that the line names."""
    import traceback

    from .errors import describe

    trace = "".join(traceback.format_exception(error))
    if _state.debug:
        print(trace, end="", file=sys.stderr)
    text, is_foreseen = describe(error)
    if is_foreseen:
        return f"attnres: {text}"
    line = f"attnres: unforeseen {text}"
    return line if _state.debug else f"{line} ({_write_traceback(trace)})"


def _write_traceback(trace: str) -> str:
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
