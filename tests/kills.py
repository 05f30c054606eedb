"""Child processes that are killed at a chosen file call, as a power cut or `kill -9` would."""

import os
from collections.abc import Callable

FILE_CALLS = ("mkdir", "open", "remove", "rename", "replace", "rmdir", "unlink")


def in_child(do: Callable[[], object], killed_at: int | None = None) -> int:
    """Start a process that calls `do`, and that dies before its call of `FILE_CALLS` of this number. Return its id."""
    child = os.fork()
    if child:
        return child
    calls = 0

    def until_killed(call: Callable) -> Callable:
        def counted(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == killed_at:
                os._exit(9)
            return call(*args, **kwargs)

        return counted

    code = 1
    try:
        if killed_at is not None:
            for name in FILE_CALLS:
                setattr(os, name, until_killed(getattr(os, name)))
        do()
        code = 0
    finally:
        os._exit(code)


def exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
