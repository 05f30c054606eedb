"""What crosses between the checker and the program under test: length-prefixed JSON of plain values, nothing else.

    message = 4 bytes big endian (n), n bytes of JSON
    value   = None, bool, int, float, str, list as in JSON; {TYPE: [ARGUMENTS]} for what TYPE(*ARGUMENTS) builds again,
              TYPE one of `PLAIN`; {"type": NAME} for a built-in type; {"ref": N} for an object that stays where it is

Reading a message runs no code of the other side: an object whose `__eq__` says yes to everything arrives as a
reference, which equals nothing.
This module stands alone: the child process loads it by itself, without the package.
"""

import builtins
import json
import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

LONGEST_MESSAGE = 64 << 20  # bytes; an answer beyond that is not one
WIDEST_INTEGER = 1 << 63  # beyond it integers go as hexadecimal text: Python limits decimal text to 4300 digits


def _naive(moment) -> tuple:
    """The clock fields of a `time` or `datetime` without time zone (with one: ValueError, it stays where it is)."""
    if moment.tzinfo is not None:
        raise ValueError("a time with a time zone does not cross")
    return moment.hour, moment.minute, moment.second, moment.microsecond


# Type -> the arguments that build an equal value. Only these types are ever built from a message.
PLAIN: dict[str, Callable[[Any], tuple]] = {
    "builtins.int": lambda v: (hex(v), 16),
    "builtins.tuple": lambda v: ([*v],),
    "builtins.dict": lambda v: ([[key, value] for key, value in v.items()],),
    "builtins.set": lambda v: ([*v],),
    "builtins.frozenset": lambda v: ([*v],),
    "builtins.bytes": lambda v: ([*v],),
    "builtins.bytearray": lambda v: ([*v],),
    "builtins.complex": lambda v: (v.real, v.imag),
    "builtins.range": lambda v: (v.start, v.stop, v.step),
    "builtins.slice": lambda v: (v.start, v.stop, v.step),
    "builtins.dict_keys": lambda v: ([*v],),
    "builtins.dict_items": lambda v: ([*v],),
    "collections.Counter": lambda v: (dict(v),),
    "collections.OrderedDict": lambda v: ([*v.items()],),
    "collections.defaultdict": lambda v: (None, dict(v)),
    "collections.deque": lambda v: ([*v], v.maxlen),
    "array.array": lambda v: (v.typecode, v.tolist()),
    "decimal.Decimal": lambda v: (str(v),),
    "fractions.Fraction": lambda v: (v.numerator, v.denominator),
    "datetime.date": lambda v: (v.year, v.month, v.day),
    "datetime.time": _naive,
    "datetime.datetime": lambda v: (v.year, v.month, v.day, *_naive(v)),
    "datetime.timedelta": lambda v: (v.days, v.seconds, v.microseconds),
}
_NO_CONSTRUCTOR = {
    "builtins.dict_keys": lambda keys: dict.fromkeys(keys).keys(),
    "builtins.dict_items": lambda items: dict(items).items(),
}
_TYPES = {name: value for name, value in vars(builtins).items() if isinstance(value, type)}
# Subclasses of these (an IntEnum, numpy's float64) go as the value of the base.
_SCALARS = (str.__str__, str), (bool.__bool__, bool), (int.__int__, int), (float.__float__, float)


def encode(value: Any, keep: Callable[[Any], int]) -> Any:
    """The JSON form of `value`; what is not plain data becomes a reference with the number that `keep` gives it."""
    kind = type(value)
    if value is None or kind in (bool, str, float) or (kind is int and -WIDEST_INTEGER < value < WIDEST_INTEGER):
        return value
    if kind is list:
        return [encode(item, keep) for item in value]
    if kind is type and _TYPES.get(value.__name__) is value:
        return {"type": value.__name__}
    if kind.__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        return encode(value.item(), keep)
    for base in kind.__mro__:
        name = f"{base.__module__}.{base.__qualname__}"
        if name in PLAIN and not (base is int and kind is not int):
            try:
                return {name: [encode(argument, keep) for argument in PLAIN[name](value)]}
            except ValueError:
                break
        if base is list:
            return [encode(item, keep) for item in value]
    for convert, base in _SCALARS:
        if isinstance(value, base) and kind is not base:
            return encode(convert(value), keep)
    return {"ref": keep(value)}


def decode(data: Any, fetch: Callable[[int], Any]) -> Any:
    """The value of a JSON form; `fetch` gives what a reference stands for. ValueError: the form has no meaning."""
    if isinstance(data, list):
        return [decode(item, fetch) for item in data]
    if not isinstance(data, dict):
        return data
    ((name, content),) = data.items()
    if name == "ref":
        return fetch(content)
    if name == "type":
        return _TYPES[content]
    if name not in PLAIN:
        raise ValueError(f"no plain type {name!r}")
    module, _, kind = name.rpartition(".")
    build = _NO_CONSTRUCTOR.get(name) or getattr(import_module(module), kind)
    return build(*(decode(argument, fetch) for argument in content))


def frame(message: Any) -> bytes:
    """The bytes of one message."""
    body = json.dumps(message).encode()
    return len(body).to_bytes(4, "big") + body


def unframe(data: bytes) -> Any:
    """The message whose bytes these are."""
    return json.loads(data[4:])


def send(descriptor: int, message: Any) -> None:
    """Write one message whole."""
    rest = memoryview(frame(message))
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def receive(descriptor: int) -> Any:
    """Read one message and not a byte more. EOFError: the other side is gone; ValueError: it sends no messages."""
    length = int.from_bytes(_read(descriptor, 4), "big")
    if length > LONGEST_MESSAGE:
        raise ValueError(f"a message of {length} bytes (the limit is {LONGEST_MESSAGE})")
    return json.loads(_read(descriptor, length))


def _read(descriptor: int, length: int) -> bytes:
    parts = []
    while length:
        part = os.read(descriptor, min(length, 1 << 20))
        if not part:
            raise EOFError("the other side is gone")
        parts.append(part)
        length -= len(part)
    return b"".join(parts)
