"""Turn any error into one line for the user: what is wrong, in which file, and what to do.

This is the one place that knows the errors of libraries. Other code raises errors of its own where a number would be
wrong in silence, data lost or more than a minute wasted, and names the file of a library's error by
[`attnres.utils.errors.about`].
"""

import os
import re
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from attnres.utils.errors import is_lost_connection, is_timeout, notes_of, why_not_written
from attnres.utils.wording import extras_with, install_command, printable

# Errors with messages for users, wherever they are raised.
_FOR_USERS = (ImportError, OSError)
# Errors with messages for users if this package raises them. From another package they are unforeseen.
_FOR_USERS_IF_OURS = (ArithmeticError, RuntimeError, ValueError)
_GOES_ON = "The same command goes on: what was sent is not sent again."
_REPEAT = f"Is the Hub reachable? {_GOES_ON}"
# The classes of errors that libraries raise on files, settings or machines, with a remedy. They are known by name,
# since the line must not depend on an import that fails.
_OF_LIBRARIES = {
    "SafetensorError": "Copy the file again.",
    "UnpicklingError": "Copy the file again.",
    "OutOfMemoryError": "Use a smaller batch, shorter sequences or a smaller dtype.",
    "MemoryError": "Use a smaller model, or a machine with more memory.",
    "LocalTokenNotFoundError": "Log in to the Hub by `hf auth login`, or set HF_TOKEN.",
    "HFValidationError": "Give NAME or ORG/NAME.",
    "BrokenPipeError": "",
    "ConnectionError": _REPEAT,  # of hf_xet, after it has repeated the request
    "HTTPError": _REPEAT,
    "StrictDataclassError": "",
}
# The remedies by the status of the Hub's answer. After any other status, the same command would be refused again.
_OF_THE_HUB = {
    401: "Log in by `hf auth login`.",
    403: "Use a token that may do this. `attnres push` may also take another name or --create-pr.",
    404: "Does it exist, and may your token read it (`hf auth whoami`)?",
    **dict.fromkeys((429, 500, 502, 503, 504), _GOES_ON),
}
# A note of `about`: the file, and the remedy with the stop before it.
_NOTE = re.compile(r"\(in (.*?)\)((?:\. .*)?)")
# The message of PyTorch if the machine has no memory for a tensor on the CPU.
_NO_MEMORY = re.compile(r"DefaultCPUAllocator: (can't allocate|not enough) memory")


def describe(error: BaseException) -> tuple[str, bool]:
    """Return the line for an error, and whether the error was foreseen. The class of an unforeseen error is named."""
    notes = notes_of(error)
    if failures := getattr(error, "failures", None):  # a checkpoint in parts; its text has a traceback for each process
        error = next(iter(failures.values()))[0]
    if is_lost_connection(error):
        return "another process of this run has ended; see its message.", True
    if is_timeout(error):
        return (
            f"process {os.environ.get('RANK', '0')} has waited too long for the other processes: one of them hangs, or "
            "a step takes longer. `pipeline.timeout` of the recipe, or else `trainer.ddp_timeout`, sets the limit.",
            True,
        )
    text = why_not_written(error) if isinstance(error, OSError) else " ".join(str(error).split())
    if isinstance(error, ModuleNotFoundError) and text.startswith("No module named"):
        text = _name_extra(error, text)
    name = next((name for name in _classes(error) if name in _OF_LIBRARIES), None)
    if name is None and isinstance(error, RuntimeError) and _NO_MEMORY.search(text):
        name = "MemoryError"
    remedy = _OF_LIBRARIES.get(name or "", "")
    if "HfHubHTTPError" in _classes(error):
        text, remedy = _describe_answer(error, text)
    is_plain = isinstance(error, _FOR_USERS) or (
        isinstance(error, _FOR_USERS_IF_OURS) and _is_ours(error.__traceback__)
    )
    is_foreseen = is_plain or name is not None or bool(notes)
    kind = type(error).__name__
    if not is_plain and not isinstance(error, ValueError if notes else ()):
        text = f"{kind}{text and ': '}{text}"
    line = text or kind
    for note in notes:
        named = _NOTE.fullmatch(note)
        added = named[2] if named is not None and named[1] in line else f" {note}"
        line = line.rstrip(".") + added if added else line
    if remedy and not notes:
        line = f"{line.rstrip('.')}. {remedy}"
    # A name in the message may contain control characters, which could change the terminal.
    return printable(line), is_foreseen


def _describe_answer(error: Any, text: str) -> tuple[str, str]:
    """Return what the Hub has answered, or `text` if the answer has no message; and the remedy."""
    status = error.response.status_code
    message = " ".join((error.server_message or text).split())
    return f"the Hub answered {status}: {message}", _OF_THE_HUB.get(status, "")


def _classes(error: BaseException) -> Iterator[str]:
    """Yield the names of the classes of an error, the most special first."""
    return (c.__name__ for c in type(error).__mro__)


def _name_extra(error: ModuleNotFoundError, text: str) -> str:
    """Add to the message about a missing module the command that installs it, if an extra of this package has it."""
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


__all__ = ["describe"]
