"""Values and keys of a recipe: conversion to the types of their fields, and error messages.

This file imports no heavy package, since the command line reads a recipe before it imports PyTorch.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from inspect import signature
from types import UnionType
from typing import Any, get_args, get_origin

from attnres.utils.wording import did_you_mean

_MOST_NAMED = 12  # the largest number of keys that a message names


def options_of(function: Callable) -> list[str]:
    """Return the names of the parameters that have a default."""
    return [option.name for option in signature(function).parameters.values() if option.default is not option.empty]


def check_keys(name: str, arguments: dict[str, Any], known: Collection[str]) -> None:
    """Raise ValueError if a key in the mapping `name` of a recipe is unknown."""
    for key in (key for key in arguments if key not in known):
        is_short = len(known) <= _MOST_NAMED
        raise ValueError(f"`{name}` has no `{key}`.{did_you_mean(key, known, otherwise_all=is_short)}")


def mapping(name: str, value: Any) -> dict[str, Any]:
    """Return a copy of a value of the recipe. Raise ValueError if it is not a mapping of names to values."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"`{name}` of the recipe is {value!r}, but must be a mapping of names to values.")
    return dict(value)


def typed(name: str, value: Any, kind: Any) -> Any:
    """Convert a YAML value to the type of its field. Raise ValueError if it cannot be converted.

    YAML reads `3e-4` as text, so a value of another type may be what the user means.
    """
    if isinstance(kind, UnionType):  # such as `str | None`
        if value is None:
            return None
        kind = get_args(kind)[0]
    kind = get_origin(kind) or kind
    if kind is dict:
        return mapping(name, value)
    if kind is Sequence:
        value = [] if value is None else [value] if isinstance(value, str) else value
        if isinstance(value, list | tuple):
            return tuple(typed(name, item, str) for item in value)
    with suppress(OverflowError, ValueError):
        if kind is bool and isinstance(value, bool):
            return value
        if kind is str and isinstance(value, str):
            return value
        if kind in (int, float) and isinstance(value, str | int | float) and not isinstance(value, bool):
            number = value if isinstance(value, int) else float(value)
            if kind is float or number == int(number):
                return kind(number)
    types_in_words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    allowed = types_in_words.get(kind, "a list of names")
    raise ValueError(f"`{name}` of the recipe is {value!r}, but must be {allowed}.")


__all__ = ["check_keys", "mapping", "options_of", "typed"]
