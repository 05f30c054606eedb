"""The untrusted process: run the program, then answer the guard's questions about what the program defines.

This process never receives the tests. It calls a function with given arguments and sends back the result as plain data.
Neither safety nor the verdict relies on this code: a program that replaces all of it can still only send values.

This module and `wire` are imported as top-level modules, without the package.
"""

import operator
import sys
import types
from collections.abc import Callable
from typing import Any

import wire

# The operations that the guard may request on an object that stays here.
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
    """Load the program, then the tests' set-up code in its namespace, and answer questions until the guard ends.

    Args:
        read: The pipe of the questions.
        write: The pipe of the answers.
        program: The source of the program.
        setup: The source of the set-up code.

    Raises:
        EOFError: The guard has ended.
    """
    kept: dict[int, Any] = {}  # the objects to which the guard holds references

    def keep(value: Any) -> int:
        kept[id(value)] = value
        return id(value)

    # Not "__main__", so that code under `if __name__ == "__main__"` does not run.
    module = types.ModuleType("program")
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
