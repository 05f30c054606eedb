"""The untrusted side: runs the program, then answers the checker's questions about what the program defines.

It never sees the tests: it is told to call a function with some arguments and sends back the result as plain data.
Nothing here is relied on for safety or for the verdict: the program may replace all of it and still only send values.
This module and `wire` are loaded by the child process by themselves, without the package.
"""

import operator
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import wire

# What the checker may do with an object that stays here.
OPERATIONS: dict[str, Callable] = {
    "call": lambda function, /, *args, **kwargs: function(*args, **kwargs),
    "getattr": getattr,
    "getitem": operator.getitem,
    "contains": operator.contains,
    "iter": iter,
    "next": next,
    "len": len,
    "bool": bool,
    "str": str,
    "repr": repr,
}


def serve(read: int, write: int, program: str, setup: str) -> None:
    """Load the program, then the tests' set-up code in its namespace; answer questions as long as there are any."""
    kept: dict[int, Any] = {}  # what the checker holds references to

    def keep(value: Any) -> int:
        kept[id(value)] = value
        return id(value)

    module = types.ModuleType("program")  # not "__main__": what stands under that condition is not part of a solution
    sys.modules["program"] = module

    def load() -> None:
        exec(compile(program, "<program>", "exec", dont_inherit=True), module.__dict__)
        exec(compile(setup, "<setup>", "exec", dont_inherit=True), module.__dict__)

    def look_up(name: str) -> dict:
        if name not in vars(module):
            return {"missing": name}
        value = vars(module)[name]
        return {"module": name} if isinstance(value, types.ModuleType) else {"value": wire.encode(value, keep)}

    def operate(operation: str, on: int, args: Any, kwargs: Any) -> dict:
        arguments = wire.decode(args, kept.__getitem__)
        result = OPERATIONS[operation](kept[on], *arguments, **wire.decode(kwargs, kept.__getitem__))
        answer = {"value": wire.encode(result, keep)}
        after = wire.encode(arguments, keep)
        return answer | ({"args": after} if after != args else {})

    def attempt(action: Callable, *arguments) -> None:
        try:
            answer = action(*arguments) or {"value": None}
        except Exception as error:
            kind = next(base for base in type(error).__mro__ if base.__module__ == "builtins")
            answer = {"error": [kind.__name__, _text(error)]}
        except BaseException as error:
            answer = {"end": f"raised {type(error).__name__}"}
        wire.send(write, answer)

    attempt(load)
    while True:
        question = wire.receive(read)
        attempt(look_up if "name" in question else operate, *question.values())


def _text(error: Exception) -> str:
    try:
        return str(error)[:1000]
    except Exception:
        return ""


# Events of Python's audit hooks (PEP 578) that no solution needs; those about a path that is read or removed.
_REFUSED = (
    "socket.", "subprocess.", "pty.", "os.fork", "os.posix_spawn", "os.spawn", "os.exec", "os.system", "os.startfile",
    "os.kill", "os.mkdir", "os.rmdir", "os.rename", "os.link", "os.symlink", "os.chmod", "os.chown", "os.chflags",
    "os.truncate", "os.utime", "os.setxattr", "os.removexattr", "os.lockf", "signal.", "resource.setrlimit",
    "resource.prlimit", "sqlite3.", "syslog.", "webbrowser.", "ctypes.dlsym", "ctypes.call_function", "ctypes.cdata",
    "ctypes.string_at", "ctypes.wstring_at", "sys._current", "gc.get_",
)  # fmt: skip
_READING, _REMOVING = ("os.listdir", "os.scandir", "os.chdir", "os.walk"), ("os.remove",)
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def fence(folder: str, readable: list[str], most_files: int) -> None:
    """Refuse, by an audit hook, what the system's layers refuse too: a fence, not a wall, but every platform has it.

    Reads stay under `readable` and `folder`, writes in `folder`, at most `most_files` of them. Extension modules that
    open files by themselves get past it, and so does a program that works on the interpreter itself.
    """
    realpath, separator, opened = os.path.realpath, os.sep, 0
    inside = (realpath(folder),)
    known = (*inside, *(realpath(path) for path in readable), os.devnull)

    def is_under(path: Any, roots: tuple[str, ...]) -> bool:
        path = realpath(os.fsdecode(path))
        return any(path == root or path.startswith(root.rstrip(separator) + separator) for root in roots)

    def hook(event: str, arguments: tuple) -> None:
        nonlocal opened
        if (
            event.startswith(_REFUSED)
            or (event == "ctypes.dlopen" and arguments[0] is not None)
            or (event == "object.__setattr__" and arguments[1] == "__code__")
        ):
            raise PermissionError(f"{event} is not permitted")
        path = arguments[0] if arguments else None
        if isinstance(path, int) or path is None:
            return
        if event == "open":
            if arguments[2] & _WRITING:
                opened += 1
                if opened > most_files or not (is_under(path, inside) or path == os.devnull):
                    raise PermissionError(f"writing to {path!r} is not permitted")
            elif not is_under(path, known):
                raise PermissionError(f"reading {path!r} is not permitted")
        elif (event in _READING and not is_under(path, known)) or (event in _REMOVING and not is_under(path, inside)):
            raise PermissionError(f"{event} of {path!r} is not permitted")

    sys.addaudithook(hook)
