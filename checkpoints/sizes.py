"""Check the sizes in a `config.json` before a configuration or a model is built from them.

Building takes time and memory in proportion to the numbers of layers and dimensions. So these are first compared with
the headers of the weights, or, without weights, with what any model can have.
"""

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
_LAYER_OF = re.compile(r"(?:^|.*\.)layers\.(\d+)\.")
_RESTORE = "Use the checkpoint's own config.json."
# With at most this many layers more than the weights have, the model is built, and the missing tensors are reported.
_MORE_LAYERS = 100
_MOST_SHOWN = 100  # characters
_MAX_LAYERS = 10**4  # far more than any model has; the limit where the weights are not given
_MAX_LABELS = 10**6  # labels of a classifier: `transformers` makes a name for each


def check_sizes(path: Path, fields: dict[str, Any], num_bytes: int = 0, tensors: Collection[str] | None = None) -> None:
    """Check the numbers of layers, dimensions and labels of a configuration file, and its quantisation.

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
                f"{path}: `{name}` is {value:,}, but the weights beside it are those of {layers} layers. {_RESTORE}"
            )
        # A weight takes at least one bit, in packed formats.
        if _DIMENSION.fullmatch(name) and value > 8 * num_bytes:
            raise ValueError(
                f"{path}: `{name}` is {value:,}, but the weights beside it have {num_bytes:,} bytes. {_RESTORE}"
            )


def _check_possible(path: Path, fields: dict) -> None:
    """Raise ValueError if a value is one that no model can have, whatever its weights are."""
    for name, value in _integers(fields):
        most = _MAX_LABELS if name == "num_labels" else _MAX_LAYERS if _LAYERS.fullmatch(name) else None
        if most is not None and value > most:
            raise ValueError(f"{path}: `{name}` is {value:,}, but may be at most {most:,}. {_RESTORE}")
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


def _show(value: Any) -> str:
    """Return a value as text for one line, cut if it is long."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _integers(value: Any, name: str = "") -> Iterator[tuple[str, int]]:
    """Yield the integers in nested JSON objects, each with the name of its field. Those in lists are left out."""
    if isinstance(value, dict):
        for inner, item in value.items():
            yield from _integers(item, inner)
    elif isinstance(value, list):
        for item in value:
            if isinstance(item, dict):
                yield from _integers(item)
    elif isinstance(value, int):
        yield name, value


__all__ = ["check_sizes"]
