"""Check the values in a `config.json` before a configuration or a model is built from them.

Building takes time and memory in proportion to the numbers of layers and dimensions. So these are first compared with
the headers of the weights. Other values are checked against what any model can have.
"""

import math
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from transformers.quantizers import AutoHfQuantizer

from attnres.utils.quiet import quiet_transformers

_LAYERS = re.compile(r"(?!max_)\w*(layers?|first_k_dense_replace)")
_DIMENSION = re.compile(
    r"\w*(vocab|hidden|intermediate|embedding)_size|\w*_(dim|rank)|(num|n)_\w*(heads?|experts?)|\w*conv_kernel\w*"
)
_EPSILON = re.compile(r"(\w*_)?eps(ilon)?")
_LAYER_OF = re.compile(r"(?:^|.*\.)layers\.(\d+)\.")
_RESTORE = "Use the checkpoint's own config.json."
# With at most this many layers more than the weights have, the model is built, and the missing tensors are reported.
_MORE_LAYERS = 100
_MOST_SHOWN = 100  # characters
_MAX_LAYERS = 10**4  # far more than any model has; the limit where the weights are not given
_MAX_LABELS = 10**6  # labels of a classifier: `transformers` makes a name for each


def check_sizes(path: Path, fields: dict[str, Any], num_bytes: int = 0, tensors: Collection[str] | None = None) -> None:
    """Check a configuration file: its numbers of layers, dimensions and labels, and other values that no model has.

    Args:
        path: `config.json` beside the weights, for the message.
        fields: Its fields.
        num_bytes: The size of the weights in bytes.
        tensors: The names of the tensors. Without them, only values that no model has are refused.

    Raises:
        ValueError: A value does not fit. The message names the file, the field, its value and the size of the weights.
    """
    _check_possible(path, fields)
    if tensors is None:
        return
    # A layer of every backbone has at least four tensors.
    layers = len(tensors) // 4
    if numbers := {match[1] for name in tensors if (match := _LAYER_OF.match(name))}:
        layers = min(layers, len(numbers))
    for name, value in _integers(fields):
        if _LAYERS.fullmatch(name) and value > layers + _MORE_LAYERS:
            raise ValueError(
                f"{path}: `{name}` is {_show(value)}, but the weights beside it are those of {layers} layers. "
                f"{_RESTORE}"
            )
        # A weight takes at least one bit, in packed formats.
        if _DIMENSION.fullmatch(name) and value > 8 * num_bytes:
            raise ValueError(
                f"{path}: `{name}` is {_show(value)}, but the weights beside it have {num_bytes:,} bytes. {_RESTORE}"
            )


def _check_possible(path: Path, fields: dict) -> None:
    """Raise ValueError if a value is one that no model can have, whatever its weights are."""
    for name, value, is_listed in _values(fields):
        if isinstance(value, int) and not is_listed:
            most = _MAX_LABELS if name == "num_labels" else _MAX_LAYERS if _LAYERS.fullmatch(name) else None
            if most is not None and value > most:
                raise ValueError(f"{path}: `{name}` is {_show(value)}, but may be at most {most:,}. {_RESTORE}")
        # A negative epsilon gives NaN.
        if _EPSILON.fullmatch(name) and value is not None and not _is_epsilon(value):
            raise ValueError(
                f"{path}: `{name}` is {_show(value)}, but must be a finite number from 0 on, such as 1e-06. {_RESTORE}"
            )
        # Infinity in a list may be a limit, such as that of time steps.
        if isinstance(value, float) and not math.isfinite(value) and not (is_listed and math.isinf(value)):
            raise ValueError(f"{path}: `{name}` is {_show(value)}, but must be a finite number. {_RESTORE}")
    _check_quantisation(path, fields.get("quantization_config"))


def _check_quantisation(path: Path, settings: Any) -> None:
    """Raise ValueError if `transformers` lacks the quantisation: it would load the weights as unquantised."""
    if settings is None:
        return
    place = f"{path}: `quantization_config`"
    remedy = "Remove the field if the weights are not quantised; else update transformers, or use the original weights."
    if not isinstance(settings, dict):
        raise ValueError(f"{place} is {_show(settings)}, but must be an object. {remedy}")
    try:
        with quiet_transformers():
            is_known = AutoHfQuantizer.supports_quant_method(settings)
    except (AttributeError, TypeError, ValueError):  # the method is missing, or a number or list
        is_known = False
    if not is_known:
        method = _show(settings.get("quant_method"))
        raise ValueError(f"{place} has the `quant_method` {method}, which transformers does not support. {remedy}")


def _is_epsilon(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
    except OverflowError:  # an integer beyond the largest float
        return False


def _show(value: Any) -> str:
    """Return a value as text for one line, cut if it is long."""
    # Python refuses to write an integer of more than 4300 digits.
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}" if abs(value) < 10**30 else f"an integer of {value.bit_length():,} bits"
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _integers(fields: dict) -> Iterator[tuple[str, int]]:
    """Yield the integers in nested JSON objects, each with the name of its field."""
    return ((name, value) for name, value, is_listed in _values(fields) if isinstance(value, int) and not is_listed)


def _values(value: Any, name: str = "", is_listed: bool = False) -> Iterator[tuple[str, Any, bool]]:
    """Yield the values in nested JSON objects and lists: the name of the field, the value, whether it is in a list."""
    if isinstance(value, dict):
        for inner, item in value.items():
            yield from _values(item, inner)
    elif isinstance(value, list):
        for item in value:
            yield from _values(item, name, True)
    else:
        yield name, value, is_listed


__all__ = ["check_sizes"]
