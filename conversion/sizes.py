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
# So many more than there are, a missing layer is told by the names of its tensors.
_MORE_LAYERS = 100
_MAX_LABELS = 10**6  # of classifiers, which no decoder here is; `transformers` makes a name for each


def check_sizes(path: Path, checkpoint: Checkpoint) -> None:
    """Check the numbers of layers, dimensions and labels in the configuration file `path`.

    Building a configuration or a model takes time and memory by them, even where no weight is allocated.

    Raises:
        OSError: the file is damaged.
        ValueError: naming the file, the field, its value and what the files have.
    """
    fields = read_object(path)
    entries = checkpoint.entries
    layers = len({match[1] for name in entries if (match := _LAYER_OF.match(name))})
    num_bytes = sum(entry.end - entry.start for entry in entries.values())
    for name, value in _integers(fields):
        if name == "num_labels" and value > _MAX_LABELS:
            raise ValueError(f"{path}: `{name}` is {value:,}, but may be at most {_MAX_LABELS:,}.")
        # A layer of any backbone has four tensors and more.
        if _LAYERS.fullmatch(name) and value > min(layers, len(entries) // 4) + _MORE_LAYERS:
            raise ValueError(f"{path}: `{name}` is {value:,}, but the weights beside it are those of {layers} layers.")
        # Weights may be packed, of one bit each at the least.
        if _DIMENSION.fullmatch(name) and value > 8 * num_bytes:
            raise ValueError(f"{path}: `{name}` is {value:,}, but the weights beside it have {num_bytes:,} bytes.")


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
