"""The untrusted side: runs the program, then answers the checker's questions about what the program defines.

It never sees the tests: it is told to call a function with some arguments and sends back the result as plain data.
Nothing here is relied on for safety or for the verdict: the program may replace all of it and still only send values.
This module and `wire` are loaded by the child process by themselves, without the package.
"""

import operator
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
