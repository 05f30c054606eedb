"""The numbers in a `config.json` held against what the files of weights have, before anything of that size is made."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .checkpoint import Checkpoint
from .source_files import read_object

_LAYERS = re.compile(r"(?!max_)\w*(layers?|first_k_dense_replace)")
_DIMENSION = re.compile(
    r"\w*(vocab|hidden|intermediate|embedding)_size|\w*_(dim|rank)|(num|n)_\w*(heads?|experts?)|\w*conv_kernel\w*"
)
_LAYER_OF = re.compile(r"(?:^|.*\.)layers\.(\d+)\.")
_RESTORE = "Use the checkpoint's own config.json."
# So many more than there are, a missing layer is told by the names of its tensors.
_MORE_LAYERS = 100
_MAX_LAYERS = 10**4  # far more than any model has, for configurations whose weights are not at hand
_MAX_LABELS = 10**6  # of classifiers, which no decoder here is; `transformers` makes a name for each


def check_sizes(path: Path, checkpoint: Checkpoint | None) -> None:
    """Check the numbers of layers, dimensions and labels in the configuration file `path`.

    Building a configuration or a model takes time and memory by them, even where no weight is allocated.

    Args:
        path: `config.json` beside the weights.
        checkpoint: The headers of the weights. Without them only what no model has is refused.

    Raises:
        OSError: the file is damaged.
        ValueError: naming the file, the field, its value and what the files have.
    """
    fields = read_object(path)
    _check_possible(path, fields)
    if checkpoint is None:
        return
    entries = checkpoint.entries
    # A layer of any backbone has four tensors and more.
    layers = len(entries) // 4
    if numbers := {match[1] for name in entries if (match := _LAYER_OF.match(name))}:
        layers = min(layers, len(numbers))
    num_bytes = checkpoint.num_bytes
    for name, value in _integers(fields):
        if _LAYERS.fullmatch(name) and value > layers + _MORE_LAYERS:
            raise ValueError(f"{path}: `{name}` is {_show(value)}, but the weights beside it are those of {layers} layers. {_RESTORE}")
        # Weights may be packed, of one bit each at the least.
        if _DIMENSION.fullmatch(name) and value > 8 * num_bytes:
            raise ValueError(f"{path}: `{name}` is {_show(value)}, but the weights beside it have {num_bytes:,} bytes. {_RESTORE}")


def _check_possible(path: Path, fields: dict) -> None:
    """Raise ValueError if a number is beyond that of any model, whatever the weights are."""
    for name, value in _integers(fields):
        most = _MAX_LABELS if name == "num_labels" else _MAX_LAYERS if _LAYERS.fullmatch(name) else None
        if most is not None and value > most:
            raise ValueError(f"{path}: `{name}` is {_show(value)}, but may be at most {most:,}. {_RESTORE}")


def _show(value: int) -> str:
    """Return an integer of any length for one line: Python writes none of more than 4300 digits."""
    return f"{value:,}" if abs(value) < 10**30 else f"about 2^{value.bit_length() - 1}"


def _integers(fields: Any) -> Iterator[tuple[str, int]]:
    """The integers in nested JSON objects by their names there."""
    if not isinstance(fields, dict):
        return
    for name, value in fields.items():
        if isinstance(value, int):
            yield name, value
        else:
            yield from _integers(value)


__all__ = ["check_sizes"]
