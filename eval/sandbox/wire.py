"""The messages between the guard and the program under test: JSON of plain values with its length in front.

    message = 4 bytes big endian (n), n bytes of JSON
    value   = None, bool, int, float, str, list as in JSON; {TYPE: [ARGUMENTS]} for the value that TYPE(*ARGUMENTS)
              builds, where TYPE is in `PLAIN`; {"type": NAME} for a built-in type; {"ref": N} for an object that stays
              in its process

Reading a message runs no code of the other side. For example, an object whose `__eq__` always returns true arrives as
a reference, which equals nothing else. The guard imports this module as a top-level module, without the package.
"""

import builtins
import json
import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

LONGEST_MESSAGE = 64 << 20  # bytes
# Larger integers are sent as hexadecimal text, because Python limits decimal text to 4300 digits.
WIDEST_INTEGER = 1 << 63


def _naive(moment) -> tuple:
    """Return the clock fields of a `time` or `datetime`. Raise ValueError if it has a time zone, which is not sent."""
    if moment.tzinfo is not None:
        raise ValueError("a time with a time zone is not plain data")
    return moment.hour, moment.minute, moment.second, moment.microsecond


# Type -> the arguments that build an equal value. No other types are built from a message.
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
# Values of subclasses of these (an IntEnum, numpy's float64) are sent as values of the base.
_SCALARS: list[tuple[Callable[[Any], Any], type]] = [
    (str.__str__, str), (bool.__bool__, bool), (int.__int__, int), (float.__float__, float),
]  # fmt: skip


def encode(value: Any, keep: Callable[[Any], int]) -> Any:
    """Return the JSON form of a value.

    Args:
        value: The value.
        keep: Stores an object that is not plain data, and returns the number of its reference.
    """
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
        if name in PLAIN and not (base is int and kind is not int):  # `_SCALARS` covers subclasses of int
            try:
                return {name: [encode(argument, keep) for argument in PLAIN[name](value)]}
            except ValueError:  # a time zone
                break
        if base is list:
            return [encode(item, keep) for item in value]
    for convert, base in _SCALARS:
        if isinstance(value, base) and kind is not base:
            return encode(convert(value), keep)
    return {"ref": keep(value)}


def decode(data: Any, fetch: Callable[[int], Any]) -> Any:
    """Return the value of a JSON form.

    Args:
        data: The JSON form.
        fetch: Returns the object of a reference by its number.

    Raises:
        ValueError: The form names a type that is not in `PLAIN`, or has several keys.
        KeyError: The form names an unknown built-in type.
    """
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
    """Return the bytes of one message."""
    body = json.dumps(message).encode()
    return len(body).to_bytes(4, "big") + body


def unframe(data: bytes) -> Any:
    """Return the message in these bytes."""
    return json.loads(data[4:])


def send(descriptor: int, message: Any) -> None:
    """Write one whole message.

    Args:
        descriptor: The pipe.
        message: Plain data in its JSON form.
    """
    rest = memoryview(frame(message))
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def receive(descriptor: int) -> Any:
    """Read one message from a pipe, and not a byte more.

    Raises:
        EOFError: The other side has ended.
        ValueError: The bytes are not a message, or it is too long.
    """
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
